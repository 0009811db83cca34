"""`bench engine`: decode and prefill on one engine; what `bench sweep` runs for each layout."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import decode as of_decode
from npu_gptoss.bench import prefill as of_prefill
from npu_gptoss.bench import records
from npu_gptoss.bench.actions import decode, prefill, shared
from npu_gptoss.errors import InputError

SUMMARY = "decode and prefill on one engine, as sweep runs it for each layout"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_points(parser)
    shared.share_argument(parser)


def add_points(parser: argparse.ArgumentParser) -> None:
    """All that is measured and with what; without how the ranks share the model."""
    shared.engine_arguments(parser, peer=False, share=False, json=False)
    parser.add_argument("--batch", default=[1, 8, 32, 128], help="of decode (default: 1 8 32 128)", **shared.COUNTS)
    parser.add_argument("--context", default=[1024, 8192], help="of decode (default: 1024 8192)", **shared.COUNTS)
    parser.add_argument("--steps", default=64, help="steady steps measured (default: 64)", **shared.COUNT)
    parser.add_argument("--tokens", default=[8192, 32768], help="of prefill (default: 8192 32768)", **shared.COUNTS)
    parser.add_argument("--repeats", default=3, help="prompts measured (default: 3)", **shared.COUNT)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where decode.json and prefill.json go")


def run(args: argparse.Namespace) -> int:
    records.check_folder(args.out, "decode.json", "prefill.json")
    args.json, args.profile = None, False
    with shared.running_engine(args, args.batch) as running:
        nominal, own, device = running.nominal, running.own, running.device
        shared.say_what({}, nominal, own, device, args.gpu_price)
        print("  what each number means stands in the files' `definitions`")
        found = 0
        kinds = (
            ("decode", of_decode.DEFINITIONS, of_decode.DECODE_HEAD, decode),
            ("prefill", of_prefill.DEFINITIONS, of_prefill.PREFILL_HEAD, prefill),
        )
        for what, definitions, head, action in kinds:
            print(head)
            args.json = args.out / f"{what}.json"
            rows = action.points(args, running)
            found += len(rows)
            if rows:
                shared.write(args, what, device, rows, definitions, nominal, own)
        if not found:
            raise InputError(shared.NOTHING_FITS)
    return 0
