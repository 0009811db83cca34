"""Write the list of docs/upstream.md from the repairs; without --write, compare the two.

python scripts/docs/upstream_page.py --write
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.serving.compat import Patch, patches
from scripts.docs.page_tables import ROOT, Tables

WIDTH = 158  # of the page's lines


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
    """Lists the files, and below each its repairs; a repair of several releases is one entry."""
    lines: list[str] = []
    for file, group in itertools.groupby(patches(), key=lambda patch: patch.file):
        found = list(group)
        tests = list(dict.fromkeys(test for patch in found if (test := test_of(patch))))
        lines.append(f"* `{file}`; " + (f"`{tests[0]}`" if tests else "tested with its other half"))
        for name in dict.fromkeys(patch.name for patch in found):
            named = [patch for patch in found if patch.name == name]
            first = named[0]
            releases = ", ".join(release for patch in named for release in patch.lines)
            until = ", ".join(dict.fromkeys(patch.until for patch in named))
            text = f"* **{name}** ({releases}; until {until}) {first.reason}"
            if first.upstream != "none found":
                text += f" Upstream: {first.upstream}."
            wrapped = textwrap.wrap(
                text, WIDTH - 4, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
            )
            lines += [f"    {line}" for line in wrapped]
    return "\n".join(lines)


TABLES = Tables(script="scripts/docs/upstream_page.py", page="docs/upstream.md", tables={"repairs": repairs})


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
