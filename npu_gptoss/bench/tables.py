"""Prints files of records as Markdown tables, a row a record: time, share of the floor, speed and cost."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from npu_gptoss.bench import records
from npu_gptoss.bench.records import ABSENT, KINDS, Record

# the fields that are shown beside those that tell rows apart, as far as a record has them
SHOWN = {
    "tpot_ms": "ms a token",
    "prefill_s": "s to the first token",
    "us": "us",
    "percent_of_floor": "% of the floor",
    "tokens_per_s": "tokens/s",
    "dollars_per_million_tokens": "$ a million tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="files of --json")


def run(args: argparse.Namespace) -> int:
    print("\n".join(page([records.read(file) for file in args.files])))
    return 0


def page(documents: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Files of one machine, day and kind share a table, because each layout is measured by itself."""
    found: dict[tuple[str, str], list[Record]] = {}
    for document in documents:
        versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
        head = f"{document['engine']} on {document['machine'].get('device')}, {document['date'][:10]}, {versions}"
        if price := document.get("dollars_per_gpu_hour"):
            head += f"; a GPU hour at ${price:.2f}"
        found.setdefault((f"{head}: {document['what']}", document["what"]), []).extend(document["records"])
    for (head, what), rows in found.items():
        fields = [*KINDS[what].keys, *(name for name in SHOWN if any(row.get(name) is not None for row in rows))]
        yield from (head, "", _line(SHOWN.get(name, name) for name in fields), "|" + "---|" * len(fields))
        yield from (_line(_cell(row.get(name, ABSENT.get(name))) for name in fields) for row in rows)
        yield ""


def _line(cells: Iterator[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    return "–" if value is None else f"{float(f'{value:.4g}'):g}" if isinstance(value, float) else str(value)
