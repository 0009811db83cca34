"""Run any command on an emulated Ascend 910B: the real torch-npu and vllm-ascend, no NPU and no CANN.

    npu-gptoss emulate -- vllm serve MODEL
    npu-gptoss emulate --cann 8.3.rc2 --devices 2 --trace trace.jsonl -- python my_script.py

What the real device refuses is refused here, with its errors and the number of the rule.
`make setup-emulated` sets it up.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path

from npu_gptoss.emulator.defects import DEFECTS
from npu_gptoss.emulator.launch import CANN_VERSIONS, GIB, EmulationError, Machine, environment, find_venv
from npu_gptoss.nominal import MEMORY


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cann", default="8.3.rc1", help=f"CANN version: {', '.join(CANN_VERSIONS)} (default 8.3.rc1)")
    parser.add_argument("--devices", type=int, default=1, help="how many devices the machine has (default 1)")
    memory = parser.add_mutually_exclusive_group()
    memory.add_argument("--memory", type=float, default=4.0, help="GiB of memory per device (default 4)")
    memory.add_argument(
        "--card",
        choices=sorted(MEMORY),
        help="as much memory as this card reports, for arithmetic: what is allocated of it is taken of this machine",
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
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND …", help="what to run")


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the command; returns only when it cannot be found."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise EmulationError("there is nothing to run. For example: npu-gptoss emulate -- python -c 'import torch_npu'")
    memory = MEMORY[args.card] / GIB if args.card else args.memory
    machine = Machine(args.cann, args.devices, memory, not args.lenient, args.fp32, args.trace, tuple(args.defect))
    variables = environment(machine, find_venv())
    program = shutil.which(command[0], path=variables["PATH"])
    if program is None:
        raise EmulationError(f"there is no program {command[0]!r} in the emulated environment or on this machine.")
    if machine.trace is not None:
        machine.trace.parent.mkdir(parents=True, exist_ok=True)
        machine.trace.write_text("")
    os.execve(program, [program, *command[1:]], variables)
    return 1
