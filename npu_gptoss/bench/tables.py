"""What decode and prefill cost and how fast they are, by how many GPUs share the model and how: two tables in Markdown.

The form is that of Perplexity's article on gpt-oss: prefill as seconds and dollars a million input tokens, layouts by
input lengths; decode as tokens a second of each user and dollars a million output tokens, batches by layouts.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_gptoss.bench import records
from npu_gptoss.bench.records import ABSENT
from npu_gptoss.tables import markdown

Record = Mapping[str, Any]

NOT_MEASURED = "–"  # the layout was measured, this point of it was not


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json and --out wrote")


def run(args: argparse.Namespace) -> int:
    contents = [records.read(file, SHOWN) for file in args.files]
    missing = {name: reason for content in contents for name, reason in content.get("not_measured", {}).items()}
    print("\n".join(page(contents, missing)))
    return 0


def page(documents: Sequence[Mapping[str, Any]], not_measured: Mapping[str, str]) -> list[str]:
    """The two tables, with what they were measured on and what is not in them; lines of Markdown."""
    lines: list[str] = []
    for document in documents:
        head = _measured_on(document)
        if head not in lines:
            lines += [head, ""]
        lines += tables_of(document["what"], document["records"])
    for name, reason in not_measured.items():
        lines += [f"{name}: {reason}.", ""]
    return lines[:-1]


def _measured_on(document: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    price = document.get("dollars_per_gpu_hour")
    said = "" if price is None else f"; a GPU hour at ${price:.2f}"
    return f"{document['engine']} on {document['machine']['device']}, {document['date'][:10]}, {versions}{said}."


# title of a table, the field beside the layout, and what a cell shows before the price
SHOWN: dict[str, tuple[str, str, Callable[[Record], str]]] = {
    "prefill": (
        "Prefill, {}: time to the first token, $ a million input tokens.",
        "prompt_tokens",
        lambda record: f"{record['prefill_s']:.3f} s",
    ),
    "decode": (
        "Decode, {}: tokens/s of each user, $ a million output tokens.",
        "batch",
        lambda record: f"{1e3 / record['tpot_ms']:.0f} tok/s",
    ),
}


def tables_of(what: str, records: Iterable[Record]) -> list[str]:
    """One table for each model, format and context: of prefill layouts by lengths, of decode batches by layouts."""
    title, field, cell = SHOWN[what]
    lines: list[str] = []
    for of, rows in _groups(records).items():
        layouts, points = _layouts(rows), sorted({row[field] for row in rows})
        cells = {(_layout(row), row[field]): cell(row) + _dollars(row) for row in rows}
        grid = [[cells.get((layout, point), NOT_MEASURED) for point in points] for layout in layouts]
        head, names = ["layout", *(f"{point} tokens" for point in points)], layouts
        if what == "decode":
            grid, head, names = zip(*grid, strict=True), ["batch", *layouts], points
        lines += [title.format(of), "", *markdown(head, ([n, *row] for n, row in zip(names, grid, strict=True))), ""]
    return lines


def _groups(records: Iterable[Record]) -> dict[str, list[Record]]:
    """By model, format and, of decode, context, in words; in the order in which they appear."""
    found: dict[str, list[Record]] = {}
    for record in records:
        words = [record["model"], f"{record['weights']} experts"]
        words += [f"context {record['context']}"] if "context" in record else []
        found.setdefault(", ".join(words), []).append(record)
    return found


def _layout(record: Record) -> str:
    return record.get("layout", ABSENT["layout"])


def _layouts(rows: Iterable[Record]) -> list[str]:
    """By GPUs; of as many, tensor parallel before expert parallel."""
    return sorted(
        {_layout(row) for row in rows}, key=lambda name: (int(re.sub(r"\D", "", name)), name.startswith("ep"))
    )


def _dollars(record: Record) -> str:
    """Another engine's records may have no price."""
    dollars = record.get("dollars_per_million_tokens")
    return "" if dollars is None else f", ${dollars:.3f}"
