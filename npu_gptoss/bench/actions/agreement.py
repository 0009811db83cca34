"""`bench agreement`: greedy tokens against another engine's on the same checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from npu_gptoss.bench import agreement, records
from npu_gptoss.bench.actions import shared

SUMMARY = "greedy tokens against another engine's on the same checkpoint"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shared.engine_arguments(parser, peer=False)
    parser.add_argument(
        "--peer", type=Path, required=True, metavar="FILE", help="the other engine's prompts and tokens"
    )


def run(args: argparse.Namespace) -> int:
    peer = records.read_peer(args.peer, "greedy", ("prompt_token_ids", "token_ids"))
    definitions = agreement.AGREEMENT_DEFINITIONS
    with shared.running_engine(args, [len(peer["records"])]) as running:
        nominal, own, device = running.nominal, running.own, running.device
        shared.say_what(definitions, nominal, own, device, args.gpu_price)
        record = agreement.compare(running.engine, peer["records"], running.form)
        record["peer"] = {"engine": peer["engine"]}
        print(", ".join(f"{name} {value}" for name, value in record.items() if name != "controls"))
        for control in record["controls"]:
            print("with a mistake: " + ", ".join(f"{name} {value}" for name, value in control.items()))
        shared.write(args, "agreement", device, [record], definitions, nominal, own)
    return 0
