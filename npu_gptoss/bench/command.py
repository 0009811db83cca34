"""Measure gpt-oss: decode and prefill of the offline engine, and each kernel alone, beside the floor.

Without a checkpoint at hand, `bench checkpoint` writes one of full size with random weights first. On a machine
whose nominal ceilings are not known here, a CPU for one, the floors are at the ceilings that the run itself measures,
and only numbers of one run compare. `vllm bench serve` measures a server.
"""

from __future__ import annotations

import argparse
from types import ModuleType

from npu_gptoss.bench import compare, decode, engine, graphs, kernel, prefill, random_checkpoint, sweep, tables
from npu_gptoss.bench.session import Kind

ACTIONS: dict[str, tuple[str, Kind | ModuleType]] = {
    "decode": ("time per output token, batch by context", decode.KIND),
    "prefill": ("time to the first token of one prompt", prefill.KIND),
    "kernel": ("each registered kernel of an operation alone", kernel),
    "engine": ("decode and prefill on one engine, as sweep runs it for each layout", engine),
    "sweep": ("decode and prefill, batch by parallel layout: tables of speed and cost", sweep),
    "graphs": ("decode with graphs against without: times and tokens", graphs.KIND),
    "compare": ("two files of records: faster, slower or within noise, row by row", compare),
    "table": ("tables of speed and cost by layout from the records of decode, prefill and sweep", tables),
    "checkpoint": ("write a random checkpoint of full size, without a tokenizer", random_checkpoint),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)
    for name, (summary, action) in ACTIONS.items():
        action.add_arguments(commands.add_parser(name, help=summary))


def run(args: argparse.Namespace) -> int:
    return ACTIONS[args.action][1].run(args)
