"""`bench graphs`: decode with graphs against without, times and tokens."""

from __future__ import annotations

import argparse
from typing import Any

from npu_gptoss.bench import agreement
from npu_gptoss.bench.actions import shared
from npu_gptoss.errors import InputError
from npu_gptoss.progress import say

SUMMARY = "decode with graphs against without: times and tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser, peer=False)
    parser.add_argument("--batch", default=[1], help="requests (default: 1)", **shared.COUNTS)
    parser.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **shared.COUNTS)
    parser.add_argument("--steps", default=64, help="steady steps measured (default: 64)", **shared.COUNT)


def run(args: argparse.Namespace) -> int:
    definitions = agreement.GRAPHS_DEFINITIONS
    with shared.running_engine(args, args.batch) as running:
        nominal, own, device = running.nominal, running.own, running.device
        shared.say_what(definitions, nominal, own, device, args.gpu_price)

        def measure(batch: int, context: int) -> dict[str, Any]:
            record = agreement.compare_graphs(running.engine, batch, context, args.steps, running.form)
            say(", ".join(f"{name} {value}" for name, value in record.items()))
            return record

        points = shared.batches_by_contexts(args)
        rows = shared.each_that_fits(args, "graphs", running, definitions, points, measure)
        if not rows:
            raise InputError(shared.NOTHING_FITS)
        shared.write(args, "graphs", device, rows, definitions, nominal, own)
    return 0
