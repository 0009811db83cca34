"""`bench table`: the two tables of speed and cost, in Markdown, of decode's and prefill's records."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import records, sweep

SUMMARY = "tables of speed and cost by layout from the records of decode, prefill and sweep"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json and --out wrote")


def run(args: argparse.Namespace) -> int:
    contents = [records.read(file, kinds=sweep.TABLES) for file in args.files]
    missing = {name: reason for content in contents for name, reason in content.get("not_measured", {}).items()}
    print("\n".join(sweep.page(contents, missing)))
    return 0
