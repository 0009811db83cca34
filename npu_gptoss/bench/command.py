"""Measure gpt-oss: decode and prefill of the offline engine, each kernel alone, beside the floor; a server under load.

Without a checkpoint at hand, `bench checkpoint` writes one of full size with random weights first. On a machine
whose nominal ceilings are not known here, a CPU for one, the floors are at the ceilings that the run itself measures,
and only numbers of one run compare.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from npu_gptoss.bench.actions import (
    agreement,
    checkpoint,
    compare,
    decode,
    engine,
    graphs,
    kernel,
    plot,
    prefill,
    serve,
    sweep,
    table,
)

ACTIONS: dict[str, ModuleType] = {
    "decode": decode,
    "prefill": prefill,
    "kernel": kernel,
    "engine": engine,
    "sweep": sweep,
    "serve": serve,
    "graphs": graphs,
    "agreement": agreement,
    "compare": compare,
    "table": table,
    "plot": plot,
    "checkpoint": checkpoint,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, action in ACTIONS.items():
        action.add_arguments(commands.add_parser(name, help=action.SUMMARY))


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action].run(args)
