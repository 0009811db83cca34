"""Measure gpt-oss: decode and prefill of the offline engine, and each kernel alone, beside the floor.

Without a checkpoint at hand, `bench checkpoint` writes one of full size with random weights first. On a machine
whose nominal ceilings are not known here, a CPU for one, the floors are at the ceilings that the run itself measures,
and only numbers of one run compare. `vllm bench serve` measures a server.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from npu_gptoss.bench import checkpoint, compare, decode, engine, graphs, kernel_command, prefill, sweep, tables

ACTIONS: dict[str, ModuleType] = {
    "decode": decode,
    "prefill": prefill,
    "kernel": kernel_command,
    "engine": engine,
    "sweep": sweep,
    "graphs": graphs,
    "compare": compare,
    "table": tables,
    "checkpoint": checkpoint,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, action in ACTIONS.items():
        action.add_arguments(commands.add_parser(name, help=action.SUMMARY))


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action].run(args)
