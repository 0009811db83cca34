"""Compiles a kernel for the emulated card with `bishengir-compile`: HFusion, HIVM, and the plan of the on-chip memory.

Without CANN it stops before `hivmc`, which makes the machine code. By then the kernel consists of the card's operations
and its buffers have places. docs/verify.md explains the missing step.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from ascend_emulator.compiler.lowering import Program, target
from ascend_emulator.compiler.tools import CompilerError, run, tools

# triton-ascend's options (backends/ascend/compiler.py, linalg_to_bin_enable_npu_compile_A2_A3)
OPTIONS = (
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
AVAILABLE = {"ub": 196608}  # bytes of a vector core, from the compiler's refusals
STOPPED = "External hivmc run fails"  # no CANN: only the last step is missing
_OVERFLOW = re.compile(r"(\w+) overflow, requires (\d+) bits while (\d+) bits available")
_PLANNED = re.compile(r"pointer_cast\(([^)]*)\)[^:]*: memref<((?:\d+x)*)(\w+)[^#]*#hivm\.address_space<(\w+)>")
_VECTOR = re.compile(r"hivm\.hir\.v\w+ .*outs\(.* : memref<((?:\d+x)+)")
_CONSTANT = re.compile(r"(%[\w-]+) = arith\.constant (\d+) : i64")
_GIVEN_UP = re.compile(r"automatically set ([\w-]+) to false; compilation then succeeded|, set ([\w-]+) to false")


@dataclass(frozen=True)
class Plan:
    """The compiler's result for a program. refusal: "" for none.

    memory: bytes of each on-chip memory ("ub") that the plan takes, or that it needs and the card lacks.
    without: optimisations dropped to make the buffers fit: moving code out of loops, double buffering.
    operations: count of each operation of the card. vectors: counts of vector operations by elements per operation,
    regardless of loops. scalar: loads and stores of single elements, which the scalar unit does in turn.
    """

    refusal: str
    memory: dict[str, int]
    without: tuple[str, ...]
    operations: dict[str, int]
    vectors: dict[int, int]
    scalar: int


def plan(program: Program, card: str = "") -> Plan:
    """Compiles the program for a card, by default the emulated one. Raises CompilerError if that does not run."""
    text = re.sub(r', mix_mode\s*=\s*"[^"]*"', "", program.linalg)  # triton-ascend removes it, too
    done = run(
        tools().compile, text, (f"--target={card or target()}", *OPTIONS, "--mlir-print-ir-after=hivm-plan-memory")
    )
    if "Unknown command line argument" in done.said:
        raise CompilerError(f"bishengir-compile is not ascendnpu-ir 1.2.0's: {done.said.strip().splitlines()[0]}")
    if done.status and STOPPED not in done.said:
        overflow = _OVERFLOW.search(done.said)
        memory = {overflow[1]: math.ceil(int(overflow[2]) / 8)} if overflow else {}
        return Plan(done.reason(), memory, (), {}, {}, 0)
    last = _last_attempt(done.said)
    given_up = tuple(word for pair in _GIVEN_UP.findall(done.said) for word in pair if word)
    operations = Counter(re.findall(r"hivm\.hir\.(\w+)", last))
    vectors = Counter(_elements(dims) for dims in _VECTOR.findall(last))
    return Plan(
        "", _planned(last), given_up, dict(operations), dict(vectors), len(re.findall(r"memref\.(?:load|store) ", last))
    )


def _last_attempt(said: str) -> str:
    """The functions after the planner's last attempt; each retry drops an optimisation that costs memory."""
    attempts = said.split("[NOTE] Ub overflow detected")
    dumps = re.split(r"// -----// IR Dump After PlanMemory[^\n]*\n", attempts[-1])[1:]
    return next((dump for dump in reversed(dumps) if "pointer_cast" in dump), "")


def _elements(dims: str) -> int:
    """Returns the elements of "2x5760x"."""
    return math.prod(int(dim) for dim in dims.split("x") if dim)


def _planned(text: str) -> dict[str, int]:
    """Bytes of each memory up to the end of the last buffer."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
    reach: dict[str, int] = {}
    for places, dims, kind, space in _PLANNED.findall(text):
        bits = _elements(dims) * int(re.search(r"\d+", kind)[0])
        for place in places.split(","):
            end = constants[place.strip()] + math.ceil(bits / 8)
            reach[space] = max(reach.get(space, 0), end)
    return reach
