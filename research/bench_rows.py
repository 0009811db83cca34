"""What the tables of measurements share: verdicts by goals, layouts, and where each number comes from."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "docs/benchmarks"
EARLIER = "earlier"  # ends the name of a peer that was measured on another day; one measured beside ours goes before it
GOALS_ARE_FOR = "NVIDIA H200"

Record = dict[str, Any]  # with `_`: its file's header and name


def layout_of(record: Record) -> str:
    return record.get("layout", "tp1")


def has_goals(record: Record) -> bool:
    """Goals are for one GPU of the kind that they were set for."""
    return layout_of(record) == "tp1" and record["_"]["machine"]["device"] == GOALS_ARE_FOR


def against(value: float, goal: float | None) -> str:
    """Whether a time keeps its goal."""
    if goal is None:
        return "–"
    return "met" if value <= goal else f"missed, {value / goal:.2f} ×"


def sources(records: Iterable[Record]) -> list[str]:
    """Which machine and which versions, once for each file, and what else it says of itself in a `note`."""
    headers = {record["_"]["file"]: record["_"] for record in records}
    lines = []
    for name, header in headers.items():
        versions = ", ".join(f"{k} {v[:12] if k == 'commit' else v}" for k, v in header["versions"].items())
        what = f"{header['engine']} on {header['machine']['device']}, {header['date'][:10]}"
        note = f"; {header['note']}" if header.get("note") else ""
        lines.append(f"* [{name}](benchmarks/{name}): {what}; {versions}{note}")
    return lines
