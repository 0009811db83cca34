"""`bench agreement`: greedy tokens against another engine's on the same checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import agreement, records
from npu_gptoss.bench.actions import shared
from npu_gptoss.bench.routing import expert_format
from npu_gptoss.engine.device import resolve_device

SUMMARY = "greedy tokens against another engine's on the same checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser, peer=False)
    parser.add_argument(
        "--peer", type=Path, required=True, metavar="FILE", help="the other engine's prompts and tokens"
    )


def run(args: argparse.Namespace) -> int:
    peer = records.read_peer(args.peer, "greedy", ("prompt_token_ids", "token_ids"))
    shared.check_price(args.gpu_price)
    device = resolve_device(args.device)
    engine = shared.make_engine(args, device, [len(peer["records"])])
    shared.say_what(agreement.AGREEMENT_DEFINITIONS, None, None, device, args.gpu_price)
    record = agreement.compare(engine, peer["records"], expert_format(engine))
    record["peer"] = {"engine": peer["engine"]}
    print(", ".join(f"{name} {value}" for name, value in record.items()))
    shared.write(args, "agreement", device, [record], agreement.AGREEMENT_DEFINITIONS, None, None)
    return 0
