"""Markdown tables for pages and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table. Raises ValueError for a row with more or fewer cells than the head."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"expected {len(head)} cells, got {row}")
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return lines
