"""`bench graphs`: decode with graphs against without, times and tokens."""

from __future__ import annotations

import argparse

from npu_gptoss.bench import agreement
from npu_gptoss.bench.actions import shared

SUMMARY = "decode with graphs against without: times and tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser, peer=False)
    parser.add_argument("--batch", default=[1], help="requests (default: 1)", **shared.COUNTS)
    parser.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **shared.COUNTS)
    parser.add_argument("--steps", type=int, default=64, metavar="N", help="steady steps measured (default: 64)")


def run(args: argparse.Namespace) -> int:
    definitions = agreement.GRAPHS_DEFINITIONS
    with shared.running_engine(args, args.batch) as running:
        nominal, own, device = running.nominal, running.own, running.device
        shared.say_what(definitions, nominal, own, device, args.gpu_price)
        rows = []
        for context in args.context:
            for batch in args.batch:
                rows.append(agreement.compare_graphs(running.engine, batch, context, args.steps, running.form))
                print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        shared.write(args, "graphs", device, rows, definitions, nominal, own)
    return 0
