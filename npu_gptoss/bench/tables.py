"""What decode and prefill cost and how fast they are, by how many GPUs share the model and how: two tables in Markdown.

The form is that of Perplexity's article on gpt-oss: prefill as seconds and dollars a million input tokens, layouts by
input lengths; decode as tokens a second of each user and dollars a million output tokens, batches by layouts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]

ABSENT = "–"  # the layout was measured, this point of it was not


def layout_of(record: Record) -> str:
    """Records that name none are of one GPU."""
    return record.get("layout", "tp1")


def layout_order(name: str) -> tuple[int, bool, str]:
    """By GPUs; of as many, tensor parallel before expert parallel."""
    return int(re.sub(r"\D", "", name) or 0), name.startswith("ep"), name


def speed_per_user(record: Record) -> float:
    """Tokens that each request of a decode record's batch gets in a second."""
    return 1e3 / record["tpot_ms"]


def unusual_projections(kind: str | None) -> tuple[str, ...]:
    """Named where they are not the usual ones. kind: None of early records, and of another engine's."""
    return () if kind in (None, "bf16") else (f"{kind} projections",)


def groups(records: Iterable[Record], *names: str) -> dict[tuple[Any, ...], list[Record]]:
    """Records by these fields, in the order in which they appear."""
    found: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        found.setdefault(tuple(record.get(name) for name in names), []).append(record)
    return found


def prefill_tables(records: Iterable[Record]) -> list[str]:
    """One table for each model and format: layouts by lengths."""
    lines: list[str] = []
    for (model, weights, projections), rows in groups(records, "model", "weights", "projections").items():
        lengths = sorted({row["prompt_tokens"] for row in rows})
        cells = {(layout_of(r), r["prompt_tokens"]): f"{r['prefill_s']:.3f} s{_dollars(r)}" for r in rows}
        of = ", ".join([model, f"{weights} experts", *unusual_projections(projections)])
        lines += _titled(f"Prefill, {of}: time to the first token, $ a million input tokens")
        lines += _table("layout", _layouts(rows), lengths, cells, "{} tokens".format)
    return lines


def decode_tables(records: Iterable[Record]) -> list[str]:
    """One table for each model, format and context: batches by layouts."""
    lines: list[str] = []
    keys = ("model", "weights", "projections", "context")
    for (model, weights, projections, context), rows in groups(records, *keys).items():
        batches = sorted({row["batch"] for row in rows})
        cells = {(r["batch"], layout_of(r)): f"{speed_per_user(r):.0f} tok/s{_dollars(r)}" for r in rows}
        of = ", ".join([model, f"{weights} experts", *unusual_projections(projections)])
        lines += _titled(f"Decode, {of}, context {context}: tokens/s of each user, $ a million output tokens")
        lines += _table("batch", batches, _layouts(rows), cells, str)
    return lines


def _layouts(rows: Iterable[Record]) -> list[str]:
    return sorted({layout_of(row) for row in rows}, key=layout_order)


def _dollars(record: Record) -> str:
    """Another engine's records may have no price."""
    dollars = record.get("dollars_per_million_tokens")
    return "" if dollars is None else f", ${dollars:.3f}"


def _titled(title: str) -> list[str]:
    return [f"{title}.", ""]


def _table(
    corner: str,
    rows: Sequence[Any],
    columns: Sequence[Any],
    cells: Mapping[tuple[Any, Any], str],
    head: Callable[[Any], str],
) -> list[str]:
    lines = ["| " + " | ".join([corner, *map(head, columns)]) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append("| " + " | ".join([str(row), *(cells.get((row, column), ABSENT) for column in columns)]) + " |")
    return [*lines, ""]
