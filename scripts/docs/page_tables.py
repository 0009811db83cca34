"""Tables that a script writes into a page, between two comments; and the command line of such a script."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from npu_gptoss.files import write_atomically

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Tables:
    """The generated tables of one page. `script`, `page`: paths. `tables`: name of a place -> its writer."""

    script: str
    page: str
    tables: Mapping[str, Callable[[], str]]

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

    def main(self, description: str) -> int:
        parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--write", action="store_true", help="write the page")
        args = parser.parse_args()
        page = ROOT / self.page
        before = page.read_text(encoding="utf-8")
        after = self.written(before)
        if args.write:
            write_atomically(page, after.encode())
            return 0
        print("up to date" if before == after else f"out of date: python {self.script} --write")
        return int(before != after)
