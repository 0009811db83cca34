"""`bench checkpoint`: weights of full size where no published ones are."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench.random_checkpoint import LAYOUTS, SHAPES, full_config, write_random_checkpoint
from npu_gptoss.engine.device import resolve_device

SUMMARY = "write a random checkpoint of full size, without a tokenizer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must hold no weights")
    parser.add_argument("--size", choices=SHAPES, default="20b")
    parser.add_argument("--weights", choices=LAYOUTS, default="mxfp4", help="layout of the experts (default: mxfp4)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where the numbers are drawn")


def run(args: argparse.Namespace) -> int:
    config = full_config(args.size, mxfp4=args.weights == "mxfp4")
    write_random_checkpoint(args.directory, config, seed=args.seed, device=resolve_device(args.device))
    size = sum(path.stat().st_size for path in args.directory.iterdir()) / 1e9
    print(f"{args.directory}: {args.size} {args.weights}, random, {size:.1f} GB")
    return 0
