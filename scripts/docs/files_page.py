"""Write the table of docs/files.md from the forms that the tests read; without --write, compare the two.

python scripts/docs/files_page.py --write
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.docs.page_tables import Tables
from tests.model.forms import table

TABLES = Tables(script="scripts/docs/files_page.py", page="docs/files.md", tables={"forms": table})


if __name__ == "__main__":
    sys.exit(TABLES.main(__doc__))
