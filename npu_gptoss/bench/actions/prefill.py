"""`bench prefill`: the time to the first token of one prompt."""

from __future__ import annotations

import argparse
from typing import Any

from npu_gptoss.bench import prefill
from npu_gptoss.bench.actions import shared
from npu_gptoss.progress import say

SUMMARY = "time to the first token of one prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser)
    parser.add_argument("--tokens", default=[8192], help="of the prompt (default: 8192)", **shared.COUNTS)
    parser.add_argument("--repeats", default=3, help="prompts measured (default: 3)", **shared.COUNT)
    parser.add_argument("--profile", action="store_true", help="show the device's kernels inside each prefill")


def points(args: argparse.Namespace, running: shared.Running) -> list[dict[str, Any]]:
    """A record for each length, printed as it is measured."""

    def measure(tokens: int) -> dict[str, Any]:
        record = prefill.prefill_record(
            running.engine,
            prefill.run_prefill(running.engine, tokens, args.repeats),
            tokens=tokens,
            weights=running.form,
            nominal=running.nominal,
            measured=running.own,
            price_per_hour=args.gpu_price,
            fp8_projections=args.fp8_projections,
        )
        say(prefill.prefill_line(record))
        if args.profile:
            record["inside"] = shared.show_profile(prefill.profile_prefill(running.engine, tokens))
        return record

    points = {f"{tokens} tokens": (tokens,) for tokens in args.tokens}
    return shared.each_that_fits(args, "prefill", running, prefill.DEFINITIONS, points, measure)


def run(args: argparse.Namespace) -> int:
    head, line = prefill.PREFILL_HEAD, prefill.prefill_line
    return shared.with_engine(args, "prefill", prefill.DEFINITIONS, head, line, points, [1])
