"""The trait `rows`: how many tokens a call has, in the classes that decide which kernel is best."""

from __future__ import annotations

ONE, FEW, MANY = "one", "few", "many"
ROW_CLASSES = (ONE, FEW, MANY)
FEW_ROWS = 256


def row_class(rows: int) -> str:
    """The trait `rows` of a call: a single decode row, a decode batch, or a prefill."""
    return ONE if rows == 1 else FEW if rows <= FEW_ROWS else MANY
