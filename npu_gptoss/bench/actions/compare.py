"""`bench compare`: two files of records, row by row, with the noise that each row's own spread allows."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import compare, records

SUMMARY = "two files of records: faster, slower or within noise, row by row"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD.json", help="what --json wrote before")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="and after")
    parser.add_argument("--fail-on-slower", action="store_true", help="exit with 1 when a row is slower beyond noise")


def run(args: argparse.Namespace) -> int:
    found = compare.compare(*(records.read(file) for file in (args.old, args.new)))
    print("\n".join(compare.table(found)))
    return 1 if args.fail_on_slower and found.slower else 0
