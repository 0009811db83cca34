"""`bench prefill`: the time to the first token of one prompt."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from npu_gptoss.bench import prefill
from npu_gptoss.bench.actions import shared
from npu_gptoss.bench.decode import DoesNotFit
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.engine import Engine
from npu_gptoss.progress import counted, say

SUMMARY = "time to the first token of one prompt"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser)
    parser.add_argument("--tokens", default=[8192], help="of the prompt (default: 8192)", **shared.COUNTS)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="prompts measured (default: 3)")
    parser.add_argument("--profile", action="store_true", help="show the device's kernels inside each prefill")


def points(
    args: argparse.Namespace, engine: Engine, form: str, nominal: Ceilings, own: Ceilings | None
) -> list[dict[str, Any]]:
    """A record for each length, printed as it is measured; what does not fit is said and left out."""
    rows = []
    for tokens in counted(args.tokens, len(args.tokens), "prefill", "point"):
        try:
            times = prefill.run_prefill(engine, tokens, args.repeats)
        except DoesNotFit as error:
            print(f"{tokens} tokens: not measured: {error}", file=sys.stderr)
            continue
        rows.append(
            prefill.prefill_record(
                engine,
                times,
                tokens=tokens,
                weights=form,
                nominal=nominal,
                measured=own,
                price_per_hour=args.gpu_price,
            )
        )
        say(prefill.prefill_line(rows[-1]))
        if args.profile:
            rows[-1]["inside"] = shared.show_profile(prefill.profile_prefill(engine, tokens))
    return rows


def run(args: argparse.Namespace) -> int:
    head, line = prefill.PREFILL_HEAD, prefill.prefill_line
    return shared.with_engine(args, "prefill", prefill.DEFINITIONS, head, line, points, [1])
