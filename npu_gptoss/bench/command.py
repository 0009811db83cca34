"""Measure gpt-oss: decode and prefill of the offline engine, and each kernel alone, beside the floor.

Without a checkpoint, `bench checkpoint` writes one of full size with random weights first. On a machine without known
nominal ceilings, such as a CPU, floors are at the ceilings that the run itself measures, and only numbers of one run
compare. `vllm bench serve` measures a server.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from npu_gptoss.bench import compare, decode, kernel, prefill, random_checkpoint, tables
from npu_gptoss.bench.session import Kind

# what does it, its help, and the arguments of its example
ACTIONS: dict[str, tuple[Kind | ModuleType, str, str]] = {
    "decode": (decode.KIND, "time per output token, batch by context", "--size 20b --batch 1 32 --json decode.json"),
    "prefill": (prefill.KIND, "time to the first token of a prompt", "--size 20b --tokens 8192 --json prefill.json"),
    "kernel": (kernel, "each kernel of an operation alone", "moe.experts attention.paged --batch 1 32 --json k.json"),
    "compare": (compare, "two files of records, row by row: faster, slower or noise", "a.json b.json --fail-on-slower"),
    "table": (tables, "a Markdown table of records: time, floor, speed, cost", "*/prefill.json */decode.json"),
    "checkpoint": (random_checkpoint, "write a random full-size checkpoint", "random-20b --size 20b --weights mxfp4"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, (does, summary, example) in ACTIONS.items():
        shown = f"example: npu-gptoss bench {name} {example}"
        does.add_arguments(commands.add_parser(name, help=summary, description=f"{summary}.", epilog=shown))


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action][0].run(args)
