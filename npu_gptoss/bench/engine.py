"""`bench engine`: decode and prefill on one engine. `bench sweep` runs it for each layout."""

from __future__ import annotations

import argparse

from npu_gptoss.bench import decode, prefill, records, session
from npu_gptoss.errors import InputError

KINDS = (decode.KIND, prefill.KIND)
FILES = tuple(f"{kind.what}.json" for kind in KINDS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_points(parser)
    session.add_options(parser, "--share-experts")


def add_points(parser: argparse.ArgumentParser) -> None:
    """The options of the points and of the engine, without the layout of the ranks."""
    defaults = {"context": [1024, 8192], "tokens": [8192, 32768], "steps": 64}
    session.engine_arguments(parser, "--batch", "--context", "--steps", "--tokens", "--repeats", "--out", **defaults)


def run(args: argparse.Namespace) -> int:
    records.check_folder(args.out, *FILES)
    args.profile = False
    with session.running_engine(args) as running:
        session.print_head({}, running.device, running.ceilings, args.gpu_price)
        print("  the files' `definitions` explain each number")
        found = 0
        for kind, file in zip(KINDS, FILES, strict=True):
            args.json = args.out / file
            found += session.measure_kind(kind, running)
        if not found:
            raise InputError(session.NOTHING_FITS)
    return 0
