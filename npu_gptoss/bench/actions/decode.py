"""`bench decode`: the time per output token, batch by context."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from npu_gptoss.bench import decode
from npu_gptoss.bench.actions import shared
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.engine import Engine
from npu_gptoss.progress import counted, say

SUMMARY = "time per output token, batch by context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser)
    parser.add_argument("--batch", default=[1, 8, 32, 128], help="requests (default: 1 8 32 128)", **shared.COUNTS)
    parser.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **shared.COUNTS)
    parser.add_argument("--steps", type=int, default=128, metavar="N", help="steady steps measured (default: 128)")
    parser.add_argument("--profile", action="store_true", help="show the device's kernels inside a step of each point")


def points(
    args: argparse.Namespace, engine: Engine, form: str, nominal: Ceilings, own: Ceilings | None
) -> list[dict[str, Any]]:
    """A record for each batch and context, printed as it is measured; what does not fit is said and left out."""
    rows = []
    wanted = [(batch, context) for context in args.context for batch in args.batch]
    for batch, context in counted(wanted, len(wanted), "decode", "point"):
        try:
            found = decode.run_decode(engine, batch, context, args.steps)
        except decode.DoesNotFit as error:
            print(f"batch {batch}, context {context}: not measured: {error}", file=sys.stderr)
            continue
        rows.append(
            decode.decode_record(
                engine,
                found,
                batch=batch,
                context=context,
                weights=form,
                nominal=nominal,
                measured=own,
                price_per_hour=args.gpu_price,
                fp8_projections=args.fp8_projections,
            )
        )
        say(decode.decode_line(rows[-1]))
        if args.profile:
            rows[-1]["inside"] = shared.show_profile(decode.profile_decode(engine, batch, context))
    return rows


def run(args: argparse.Namespace) -> int:
    head, line = decode.DECODE_HEAD, decode.decode_line
    return shared.with_engine(args, "decode", decode.DEFINITIONS, head, line, points, args.batch)
