"""Write the soak's table of docs/reliability.md from its records; without --write, compare the two.

python scripts/docs/soak_page.py --write

`make soak` leaves a record of each run in outputs/soak; the page's records are in docs/benchmarks/soak.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.docs.page_tables import ROOT, Tables
from tests.soak import report

PAGE = "docs/reliability.md"
FOLDER = ROOT / "docs/benchmarks/soak"


def soaked(folder: Path = FOLDER) -> str:
    found = report.load(folder)
    return "\n" + (report.table(found) if found else "No full run has been recorded yet.")


TABLES = Tables(script="scripts/docs/soak_page.py", page=PAGE, tables={"soak": soaked})


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
