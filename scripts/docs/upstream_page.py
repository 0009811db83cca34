"""Write the list of docs/upstream.md from the repairs; without --write, compare the two.

python scripts/docs/upstream_page.py --write
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from npu_gptoss.serving.compat import patches
from scripts.docs.page_tables import Tables

WIDTH = 158  # of the page's lines


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


TABLES = Tables(script="scripts/docs/upstream_page.py", page="docs/upstream.md", tables={"repairs": repairs})


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
