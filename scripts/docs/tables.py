"""Write the tables of the pages from the code, between two comments each; without --write, compare the two.

python scripts/docs/tables.py --write

`make endure` leaves a record of each run in outputs/endure; the records of docs/reliability.md are in
docs/benchmarks/endure. `python -m tests.endure.faults` leaves docs/benchmarks/faults.json.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss import envs
from npu_gptoss.doctor.memory import preset_lines
from npu_gptoss.files import write_atomically
from npu_gptoss.kernels.loading import load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.serving.compat import patches
from npu_gptoss.serving.releases import ASCEND_RELEASES, MADE_FOR, RELEASES, SILENT_DEFECTS, TORCH_OLDEST, Release

ROOT = Path(__file__).resolve().parents[2]
ENDURE = ROOT / "docs/benchmarks/endure"
FAULTS = ROOT / "docs/benchmarks/faults.json"
VALUES = {bool: "`1` or `0`", int: "a whole number", float: "seconds", tuple: "names, separated by commas", str: "text"}
WIDTH = 158  # of the page's lines


@dataclass(frozen=True)
class Tables:
    """The generated tables of one page. `tables`: name of a place -> its writer. `script`: writes them."""

    page: str
    tables: Mapping[str, Callable[[], str]]
    script: str = "scripts/docs/tables.py"

    def written(self, text: str) -> str:
        """The page with every table anew. Raises ValueError when a table's place is missing."""
        for name, table in self.tables.items():
            begin, end = f"<!-- {name}, by {self.script}: begin -->", f"<!-- {name}: end -->"
            parts = re.split(f"({re.escape(begin)}\n).*?({re.escape(end)})", text, flags=re.S)
            count = len(parts) // 3
            if count != 1:
                raise ValueError(
                    f"{self.page} should have one place for {name}, between {begin} and {end}; it has {count}"
                )
            before, begin, end, after = parts
            text = f"{before}{begin}\n{table()}\n\n{end}{after}"
        return text


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


def window() -> str:
    oldest, on_cpu = ".".join(map(str, TORCH_OLDEST)), next(row for row in RELEASES if "cpu" in row.devices)

    def column(row: Release) -> tuple[str, ...]:
        named, (major, minor) = row.driver
        return (
            ", ".join(row.python_on_ascend),
            *(", ".join(found.releases) for found in (row.torch, row.torch_npu, row.vllm, row.vllm_ascend)),
            ", ".join(row.triton_ascend.releases) + ("" if row.launches_triton else ", for packed experts only"),
            ", ".join(row.cann.releases) + "; no alpha or beta build",
            f"{named}; from {major}.{minor} on",
        )

    names = ("Python", "torch", "torch-npu", "vLLM, built with `VLLM_TARGET_DEVICE=empty`", "vllm-ascend")
    names = (*names, "triton-ascend", "CANN and NNAL", "driver (Ascend HDK)")
    cpu = (", ".join(on_cpu.python), f"≥ {oldest}", "–", ", ".join(on_cpu.vllm.releases), *("–",) * 4)
    rows = zip(names, *map(column, ASCEND_RELEASES), cpu, strict=True)
    titles = [f"Ascend 910B, CANN {row.cann.recommended.removesuffix('.0')}" for row in ASCEND_RELEASES]
    head = ["", *titles, "CPU"]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def made_for() -> str:
    rows = [(f"{major}.{minor}", *releases) for (major, minor), releases in MADE_FOR.items()]
    lines = ["| CANN | vllm-ascend made for it | this package |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| {cann} | {first} to {last} | serves on none of it |" for cann, first, last in rows)]
    )


def silent() -> str:
    rows = [(".".join(map(str, first)), ".".join(map(str, last)), what) for first, last, what in SILENT_DEFECTS]
    lines = ["| vllm-ascend | gpt-oss there |", "|---|---|"]
    return "\n".join(
        [*lines, *(f"| {'to' if first == '0.0' else f'{first} to'} {last} | {what} |" for first, last, what in rows)]
    )


def presets() -> str:
    return "\n".join(
        textwrap.fill(f"* {line}.", 150, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
        for line in preset_lines(16384)
    )


def endured(folder: Path = ENDURE) -> str:
    from tests.endure import judge  # and with it much that the other tables do without

    return judge.table(judge.load(folder))


def faults() -> str:
    from tests.endure.faults import load, table

    return table(load(FAULTS))


def forms() -> str:
    from tests.model.forms import table

    return table()


def repairs() -> str:
    """Lists the repairs; one function is one entry."""
    lines: list[str] = []
    for install in dict.fromkeys(patch.install for patch in patches()):
        entries = [patch for patch in patches() if patch.install is install]
        first = entries[0]
        names = ", ".join(dict.fromkeys(f"**{patch.name}**" for patch in entries))
        releases = ", ".join(dict.fromkeys(release for patch in entries for release in patch.releases))
        until = ", ".join(dict.fromkeys(patch.until for patch in entries))
        text = f"* {names} (`{first.file}`; {releases}; until {until}) {first.reason}"
        if first.upstream != "none found":
            text += f" Upstream: {first.upstream}."
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


PAGES = (
    Tables("docs/configuration.md", {"variables": variables, "operations": operations}),
    Tables("docs/doctor.md", {"window": window, "made-for": made_for, "silent": silent, "presets": presets}),
    Tables("docs/files.md", {"forms": forms}),
    Tables("docs/reliability.md", {"endure": endured, "faults": faults}),
    Tables("docs/upstream.md", {"repairs": repairs}),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    write, old = parser.parse_args().write, 0
    for page in PAGES:
        before = (ROOT / page.page).read_text(encoding="utf-8")
        if before != (after := page.written(before)):
            old += 1
            print(f"{page.page}: {'written' if write else 'out of date'}")
            if write:
                write_atomically(ROOT / page.page, after.encode())
    return int(bool(old) and not write)


if __name__ == "__main__":
    sys.exit(main())
