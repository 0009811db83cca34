"""Write the tables of docs/configuration.md from the code; without --write, compare the two.

python scripts/docs/configuration_page.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss import envs
from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.registry import registry
from scripts.docs.page_tables import Tables

VALUES = {bool: "`1` or `0`", int: "a whole number", float: "seconds", tuple: "names, separated by commas", str: "text"}


def variables() -> str:
    lines = ["| variable | value | default | meaning |", "|---|---|---|---|"]
    for variable in envs.VARIABLES.values():
        default = (
            f"`{int(variable.default)}`"
            if isinstance(variable.default, bool)
            else f"{variable.default:g}"
            if isinstance(variable.default, float)
            else str(variable.default or "unset")
        )
        if isinstance(variable.default, tuple):
            default = ", ".join(variable.default) or "none"
        lines.append(f"| `{variable.name}` | {VALUES[type(variable.default)]} | {default} | {variable.meaning} |")
    return "\n".join(lines)


def operations() -> str:
    """Lists each operation's variable and the solutions of this package, not of other installed packages."""
    load_kernels()
    lines = ["| variable | solutions |", "|---|---|"]
    for operation in sorted(registry.operations.values(), key=lambda operation: operation.name):
        name = f"{envs.KERNEL_OVERRIDE_PREFIX}{operation.family}_{operation.mode}".upper()
        own = [kernel.solution for kernel in registry.kernels_of(operation) if kernel.origin == "npu_gptoss"]
        lines.append(f"| `{name}` | {', '.join(f'`{each}`' for each in dict.fromkeys(own))} |")
    return "\n".join(lines)


TABLES = Tables(
    script="scripts/docs/configuration_page.py",
    page="docs/configuration.md",
    tables={"variables": variables, "operations": operations},
)


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
