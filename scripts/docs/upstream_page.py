"""Write the table of docs/upstream.md from the table of repairs; without --write, say whether it is up to date.

python scripts/docs/upstream_page.py --write
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.serving.compat import Patch, patches
from scripts.docs.page_tables import ROOT, Tables


def test_of(patch: Patch) -> str:
    """The file of tests that names the repair; preferred: the one named like its module, else the shortest path."""
    module = patch.file.removesuffix(".py")
    named = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests/serving").rglob("test_*.py")
        if re.search(rf"[\"']{patch.name}[\"']", path.read_text(encoding="utf-8")) or path.stem == f"test_{module}"
    ]
    if not named:  # its half in another process has the tests
        return ""
    return min(named, key=lambda name: (f"test_{module}.py" not in name, len(name), name))


def repairs() -> str:
    lines = ["| repair | vLLM | without it | upstream | until | code | test |", "|---|---|---|---|---|---|---|"]
    for patch in patches():
        test = test_of(patch)
        releases, reason = ", ".join(patch.lines), patch.reason.replace("|", "\\|")
        cells = (f"`{patch.name}`", releases, reason, patch.upstream, patch.until, f"`{patch.file}`")
        lines.append(f"| {' | '.join(cells)} | {f'`{test}`' if test else 'with its other half'} |")
    return "\n".join(lines)


TABLES = Tables(script="scripts/docs/upstream_page.py", page="docs/upstream.md", tables={"repairs": repairs})


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
