"""Prints records of decode and prefill as Markdown tables of speed and cost by layout.

Prefill: seconds and dollars a million input tokens, layouts by lengths. Decode: tokens a second of each user and
dollars a million output tokens, batches by layouts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_gptoss.bench import records
from npu_gptoss.bench.records import ABSENT, Record
from npu_gptoss.tables import markdown

NOT_MEASURED = "–"
# title, the field beside the layout, a cell without its price
SHOWN: dict[str, tuple[str, str, Callable[[Record], str]]] = {
    "prefill": (
        "Prefill, {}: time to the first token, $ a million input tokens.",
        "prompt_tokens",
        lambda row: f"{row['prefill_s']:.3f} s",
    ),
    "decode": (
        "Decode, {}: tokens/s of each user, $ a million output tokens.",
        "batch",
        lambda row: f"{1e3 / row['tpot_ms']:.0f} tok/s",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of --json")


def run(args: argparse.Namespace) -> int:
    print("\n".join(page([records.read(file, SHOWN) for file in args.files])))
    return 0


def page(documents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The tables of all files, under the machine that they were measured on, then layouts that were not measured.

    Files of one machine, day and kind share a table: each layout is measured by itself.
    """
    found: dict[str, dict[str, list[Record]]] = {}
    for document in documents:
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        price = document.get("dollars_per_gpu_hour")
        head = f"{document['engine']} on {document['machine']['device']}, {document['date'][:10]}, {versions}"
        head += "." if price is None else f"; a GPU hour at ${price:.2f}."
        found.setdefault(head, {}).setdefault(document["what"], []).extend(document["records"])
    lines: list[str] = []
    for head, kinds in found.items():
        lines += [head, "", *(line for what, rows in kinds.items() for line in tables_of(what, rows))]
    missing = {n: reason for document in documents for n, reason in document.get("not_measured", {}).items()}
    return [*lines, *(line for name, reason in missing.items() for line in (f"{name}: {reason}.", ""))][:-1]


def tables_of(what: str, rows: Iterable[Record]) -> list[str]:
    """One table for each model, format and context: of prefill layouts by lengths, of decode batches by layouts."""
    title, field, cell = SHOWN[what]
    groups: dict[str, list[Record]] = {}
    for row in rows:
        context = f", context {row['context']}" if "context" in row else ""
        groups.setdefault(f"{row['model']}, {row['weights']} experts{context}", []).append(row)
    lines: list[str] = []
    for name, members in groups.items():
        layouts = sorted({_layout(row) for row in members}, key=_by_gpus)
        points = sorted({row[field] for row in members})
        cells = {(_layout(row), row[field]): cell(row) + _dollars(row) for row in members}
        head = ["layout", *(f"{point} tokens" for point in points)]
        grid = [[layout, *(cells.get((layout, point), NOT_MEASURED) for point in points)] for layout in layouts]
        if what == "decode":
            head = ["batch", *layouts]
            grid = [[point, *(cells.get((layout, point), NOT_MEASURED) for layout in layouts)] for point in points]
        lines += [title.format(name), "", *markdown(head, grid), ""]
    return lines


def _layout(row: Record) -> str:
    return row.get("layout", ABSENT["layout"])


def _by_gpus(layout: str) -> tuple[int, bool]:
    """By GPUs; of equally many, tensor parallel before expert parallel."""
    return int(re.sub(r"\D", "", layout)), layout.startswith("ep")


def _dollars(row: Record) -> str:
    """Empty for a peer's row without a price."""
    dollars = row.get("dollars_per_million_tokens")
    return "" if dollars is None else f", ${dollars:.3f}"
