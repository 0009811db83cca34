"""Write the tables of docs/benchmarking.md from the records of sweeps; without --write, say whether they fit.

python research/sweep_page.py --write

Each folder docs/benchmarks/sweep_* holds what one `npu-gptoss bench sweep --out` wrote, but its tables.md; `note` in a
file says how it differs from that. The pictures were drawn of the same files once, and no command draws them anew.
Python with torch, as the package needs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench import records, tables
from scripts.docs.page_tables import ROOT, Tables

PAGE = "docs/benchmarking.md"
FOLDER = ROOT / "docs" / "benchmarks"
KINDS = ("prefill", "decode")


def measured(folder: Path = FOLDER) -> str:
    """The tables and pictures of every sweep, in the order of the folders' names."""
    lines: list[str] = []
    for each in sorted(folder.glob("sweep_*")):
        lines += shown([file for kind in KINDS if (file := each / f"{kind}.json").is_file()])
        for picture in sorted(each.glob("*.svg")):
            place = picture.relative_to(ROOT / "docs").as_posix()
            lines += ["", f"![{picture.stem.replace('_', ' ')}]({place})"]
    return "\n".join(lines or ["", "Nothing has been measured yet."])


def shown(files: Sequence[Path]) -> list[str]:
    """The page of some files, with where they are, their notes, and what is not in them."""
    if not files:
        return []
    contents = [records.read(file) for file in files]
    missing = {name: why for content in contents for name, why in content.get("not_measured", {}).items()}
    links = ", ".join(f"[{file.name}]({file.relative_to(ROOT / 'docs').as_posix()})" for file in files)
    notes = dict.fromkeys(f"Of it: {content['note']}." for content in contents if "note" in content)
    return ["", f"From {links}. {' '.join(notes)}".rstrip(), "", *tables.page(contents, missing)]


TABLES = Tables(script="research/sweep_page.py", page=PAGE, tables={"sweeps": measured})


def main(arguments: Sequence[str] | None = None) -> int:
    return TABLES.main(__doc__, arguments)


if __name__ == "__main__":
    sys.exit(main())
