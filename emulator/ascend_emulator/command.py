"""Run any command on an emulated Ascend 910B: the real torch-npu and vllm-ascend, no NPU and no CANN.

    ascend-emulate -- vllm serve MODEL
    ascend-emulate --cann 8.3.rc2 --devices 2 --trace trace.jsonl -- python my_script.py
    ascend-emulate --stack 9.1 --card A3 --memory 4 -- vllm serve MODEL

Calls that a real device refuses fail here with its errors and the number of the rule.
The first run compiles the stand-ins for CANN's libraries, which needs g++.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ascend_emulator import triton_launches
from ascend_emulator.cards import CARDS, DEFAULT
from ascend_emulator.defects import DEFECTS
from ascend_emulator.errors import EmulatorError
from ascend_emulator.launch import GIB, EmulationError, Machine, environment, find_venv, stack_of
from ascend_emulator.prepare import prepare
from ascend_emulator.stacks import CANN_VERSIONS, NAMES, STACKS, below, named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    defaults = ", ".join(f"{stack.cann[0]} on {stack.name}" for stack in STACKS)
    parser.add_argument("--stack", choices=NAMES, help="the stack: which environment (default: that which is found)")
    parser.add_argument("--cann", help=f"CANN version: {', '.join(CANN_VERSIONS)} (default {defaults})")
    parser.add_argument("--devices", type=int, default=1, help="how many devices the machine has (default 1)")
    parser.add_argument("--memory", type=float, help="GiB of memory per device (default 4, or all that --card has)")
    parser.add_argument(
        "--card",
        choices=CARDS,
        help="be this card and report as much memory as it has (default 910B3); A3: one die of a 910C. Allocations "
        "still take this machine's memory",
    )
    parser.add_argument(
        "--trace", type=Path, help="write every device op, copy and synchronisation there, as JSON lines"
    )
    parser.add_argument("--lenient", action="store_true", help="poison undefined results instead of raising")
    parser.add_argument(
        "--fp32", action="store_true", help="diagnosis: let float32 tensors through where bfloat16 is asked for"
    )
    parser.add_argument(
        "--defect",
        action="append",
        default=[],
        help=f"compute a known defect of CANN: {', '.join(DEFECTS)}; repeatable",
    )
    parser.add_argument(
        "--triton",
        type=Path,
        metavar="ENVIRONMENT",
        help="an environment with Triton-Ascend and its compiler, whose kernels then run on the device (default: none)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the command; returns only if the program is not found."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise EmulationError("there is nothing to run. Put a command behind --, such as: -- vllm serve MODEL")
    card = CARDS.get(args.card, DEFAULT)
    memory = args.memory or (card.memory / GIB if args.card else 4.0)
    stack = named(args.stack) if args.stack else None
    if stack is None and args.cann in CANN_VERSIONS:
        stack = below(args.cann)
    venv = find_venv(stack=stack)
    stack = stack_of(venv) or STACKS[0]
    if args.cann in CANN_VERSIONS and args.cann not in stack.cann:
        raise EmulationError(f"stack {stack.name} runs on CANN {', '.join(stack.cann)} here, not on {args.cann}.")
    cann = args.cann or stack.cann[0]
    triton = triton_launches.site_packages(args.triton.resolve()) if args.triton else None
    machine = Machine(
        cann, args.devices, memory, not args.lenient, args.fp32, args.trace, tuple(args.defect), triton, card.name
    )
    prepare(venv)
    variables = environment(machine, venv)
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise EmulationError(f"there is no program {command[0]!r} in the emulated environment or on this machine.")
    if machine.trace is not None:
        try:
            machine.trace.parent.mkdir(parents=True, exist_ok=True)
            machine.trace.write_text("")
        except OSError as error:
            raise EmulationError(f"--trace {machine.trace}: {error.strerror}. Name another file.") from None
    os.execve(program, [program, *command[1:]], variables)
    return 1


def main(arguments: Sequence[str] | None = None, program: str = "ascend-emulate") -> int:
    """Returns 2 if the request cannot be emulated; otherwise the command takes this process's place."""
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except EmulatorError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
