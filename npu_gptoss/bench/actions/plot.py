"""`bench plot`: pictures of records that were written before."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import plots, records
from npu_gptoss.errors import InputError

SUMMARY = "pictures (PNG and SVG) of the records of decode, prefill, sweep, kernel and serve"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="what --json and --out wrote")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the pictures go")


def run(args: argparse.Namespace) -> int:
    contents = [records.read(file) for file in args.files]
    drawn = [named for content in contents for named in plots.figures(content)]
    if not drawn:
        raise InputError("these records have nothing to draw: of kernels, the share of a floor is")
    stems = [stem for stem, _ in drawn]
    twice = sorted({stem for stem in stems if stems.count(stem) > 1})
    if twice:
        raise InputError(f"two of these files make the same picture {twice[0]}: give each a command and a folder")
    records.check_place(args.out / f"{stems[0]}.svg")
    for file in plots.save(drawn, args.out):
        print(file)
    return 0
