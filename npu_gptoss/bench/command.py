"""Measure gpt-oss: decode and prefill of the offline engine, and each kernel alone, beside the floor.

Without a checkpoint, `bench checkpoint` writes one of full size with random weights first. On a machine without known
nominal ceilings, such as a CPU, floors are at the ceilings that the run itself measures, and only numbers of one run
compare. `vllm bench serve` measures a server.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from types import ModuleType

from npu_gptoss.bench import compare, decode, engine, kernel, random_checkpoint, sweep, tables
from npu_gptoss.bench.session import Kind


@dataclass(frozen=True)
class Action:
    """summary: for the list of actions and the action's --help. example: a whole command."""

    does: Kind | ModuleType
    summary: str
    example: str


ACTIONS = {
    "decode": Action(
        decode.KIND,
        "Measure the time per output token of the offline engine, batch by context.",
        "npu-gptoss bench decode --size 20b --batch 1 32 --json decode.json",
    ),
    "prefill": Action(
        engine.PREFILL,
        "Measure the time to the first token of one prompt.",
        "npu-gptoss bench prefill --size 20b --tokens 8192 --json prefill.json",
    ),
    "kernel": Action(
        kernel,
        "Measure each registered kernel of an operation alone, at gpt-oss's shapes.",
        "npu-gptoss bench kernel moe.experts attention.paged --batch 1 32 --json kernel.json",
    ),
    "engine": Action(
        engine,
        "Measure decode and prefill on one engine, as `bench sweep` does for each layout.",
        "npu-gptoss bench engine --size 20b --out results",
    ),
    "sweep": Action(
        sweep,
        "Measure decode and prefill for each way to share the model among GPUs, with tables of speed and cost.",
        "npu-gptoss bench sweep --size 20b --layouts tp1 tp2 ep2 --out results",
    ),
    "compare": Action(
        compare,
        "Compare two files of records row by row: faster, slower or within noise.",
        "npu-gptoss bench compare before.json after.json --fail-on-slower",
    ),
    "table": Action(
        tables,
        "Print tables of speed and cost by layout from records of decode, prefill and sweep.",
        "npu-gptoss bench table results/decode.json results/prefill.json",
    ),
    "checkpoint": Action(
        random_checkpoint,
        "Write a random checkpoint of full size, without a tokenizer.",
        "npu-gptoss bench checkpoint random-20b --size 20b --weights mxfp4",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, action in ACTIONS.items():
        sub = commands.add_parser(
            name, help=action.summary, description=action.summary, epilog=f"example: {action.example}"
        )
        action.does.add_arguments(sub)


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action].does.run(args)
