"""Write a tiny gpt-oss checkpoint in the official layout with the real vocabulary: random weights, or trained ones.

The trained one answers sums, four-choice questions and function calls in harmony (docs/tiny-checkpoint.md). A directory
with the same checkpoint stays unchanged.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.tiny.checkpoint import SHAPE, TinyError, tiny_config, write_tiny


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to write; must be new or empty")
    parser.add_argument("--trained", action="store_true", help="the trained checkpoint; its shape is fixed")
    parser.add_argument("--mxfp4", action="store_true", help="MXFP4 experts; the same function as the BF16 checkpoint")
    shape = parser.add_argument_group("random weights")
    for name, default in SHAPE.items():
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default {default}")
    shape.add_argument("--seed", type=int, metavar="S", help="default 0")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the BF16 layout's tensors"
    )
    parser.add_argument(
        "--force", action="store_true", help="replace another checkpoint that this command wrote in DIR"
    )


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in SHAPE if getattr(args, name) is not None}
    if args.trained:
        named = [*given, *(["seed"] if args.seed is not None else [])]
        if named:
            options = ", ".join(f"--{name.replace('_', '-')}" for name in named)
            raise TinyError(
                f"the trained checkpoint has one shape and no seed: leave {options} away, or leave --trained away",
                field="--trained",
            )
    written = write_tiny(
        args.directory,
        config=None if args.trained else tiny_config(**given),
        seed=args.seed or 0,
        trained=args.trained,
        mxfp4=args.mxfp4,
        dtype=args.dtype,
        force=args.force,
    )
    size = sum(path.stat().st_size for path in args.directory.iterdir()) / 1e6
    print(f"{args.directory}: {'written' if written else 'already there'}, {size:.0f} MB")
    return 0
