"""`bench decode`: the time per output token, batch by context."""

from __future__ import annotations

import argparse
from typing import Any

from npu_gptoss.bench import decode
from npu_gptoss.bench.actions import shared
from npu_gptoss.progress import say

SUMMARY = "time per output token, batch by context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser)
    parser.add_argument("--batch", default=[1, 8, 32, 128], help="requests (default: 1 8 32 128)", **shared.COUNTS)
    parser.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **shared.COUNTS)
    parser.add_argument("--steps", default=128, help="steady steps measured (default: 128)", **shared.COUNT)
    parser.add_argument("--profile", action="store_true", help="show the device's kernels inside a step of each point")


def points(args: argparse.Namespace, running: shared.Running) -> list[dict[str, Any]]:
    """A record for each batch and context, printed as it is measured."""

    def measure(batch: int, context: int) -> dict[str, Any]:
        record = decode.decode_record(
            running.engine,
            decode.run_decode(running.engine, batch, context, args.steps),
            batch=batch,
            context=context,
            weights=running.form,
            nominal=running.nominal,
            measured=running.own,
            price_per_hour=args.gpu_price,
            fp8_projections=args.fp8_projections,
        )
        say(decode.decode_line(record))
        if args.profile:
            record["inside"] = shared.show_profile(decode.profile_decode(running.engine, batch, context))
        return record

    points = shared.batches_by_contexts(args)
    return shared.each_that_fits(args, "decode", running, decode.DEFINITIONS, points, measure)


def run(args: argparse.Namespace) -> int:
    head, line = decode.DECODE_HEAD, decode.decode_line
    return shared.with_engine(args, "decode", decode.DEFINITIONS, head, line, points, args.batch)
