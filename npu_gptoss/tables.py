"""Tables as text: Markdown for pages and files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a table; every row has as many cells as the head."""
    lines = [list(map(str, head)), ["---"] * len(head), *(list(map(str, row)) for row in rows)]
    uneven = next((line for line in lines if len(line) != len(head)), None)
    if uneven is not None:
        raise ValueError(f"expected {len(head)} cells, got {uneven}")
    return ["|" + "|".join(line) + "|" if line[0] == "---" else "| " + " | ".join(line) + " |" for line in lines]
