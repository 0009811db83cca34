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
    """Lists the repairs; a repair of several releases is one entry."""
    lines: list[str] = []
    for name in dict.fromkeys(patch.name for patch in patches()):
        named = [patch for patch in patches() if patch.name == name]
        first = named[0]
        releases = ", ".join(release for patch in named for release in patch.releases)
        until = ", ".join(dict.fromkeys(patch.until for patch in named))
        text = f"* **{name}** (`{first.file}`; {releases}; until {until}) {first.reason}"
        if first.upstream != "none found":
            text += f" Upstream: {first.upstream}."
        lines += textwrap.wrap(text, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


TABLES = Tables(script="scripts/docs/upstream_page.py", page="docs/upstream.md", tables={"repairs": repairs})


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
