"""Builds a kernel's linalg for this machine's CPU, with MLIR's passes and LLVM from the compiler's wheels.

The 910B's back end (`planner.py`) gets the same linalg. Here it becomes C-like code on main memory, without the card's
rounding modes, saturation or DMA.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from ascend_emulator.compiler.lowering import Program
from ascend_emulator.compiler.tools import CompilerError, run, tools
from ascend_emulator.compiler.touched import telling

TRIPLE, CPU = f"{platform.machine()}-unknown-linux-gnu", "x86-64-v2"
PASSES = (
    "--convert-elementwise-to-linalg",
    "--eliminate-empty-tensors",
    "--empty-tensor-to-alloc-tensor",
    "--one-shot-bufferize=allow-return-allocs-from-loops=true",
    "--convert-linalg-to-loops",
    "--lower-affine",
    "--convert-scf-to-cf",
    "--convert-cf-to-llvm",
    "--convert-math-to-llvm",
    "--memref-expand",
    "--expand-strided-metadata",
    "--lower-affine",
    "--convert-index-to-llvm",
    "--convert-arith-to-llvm",
    "--finalize-memref-to-llvm",
    "--convert-func-to-llvm",
    "--reconcile-unrealized-casts",
)
ZONE, FILL = 1 << 16, 0x5A  # bytes
RUNTIME = Path(__file__).with_name("runtime.c")
_C_TYPES = {
    **{f"{sign}{bits}": getattr(ctypes, f"c_int{bits}") for sign in ("i", "u") for bits in (8, 16, 32, 64)},
    "i1": ctypes.c_int8,
    "fp32": ctypes.c_float,
    "fp64": ctypes.c_double,
}


class HostKernel:
    """A kernel as a function on this machine. traced: it counts the bytes that it touches."""

    def __init__(self, program: Program, *, traced: bool = False) -> None:
        self.program = program
        self.library = ctypes.CDLL(str(_shared_object(program, telling(program.linalg) if traced else program.linalg)))
        self.function = self.library[program.name]
        self.function.restype = None

    def __call__(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Runs the programs of the grid (up to three sizes) one after the other.

        arguments: contiguous CPU tensors and numbers, in the order of the program's types. Guard zones enclose each
        tensor; raises OutOfBounds if the kernel wrote into one.
        """
        guards = {
            place: Guarded(name, arguments[place])
            for place, (name, kind) in enumerate(self.program.types)
            if kind.startswith("*")
        }
        self.on_addresses(grid, [guards.get(place, argument) for place, argument in enumerate(arguments)])
        for guard in guards.values():
            guard.give_back()

    def on_addresses(self, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        """Runs on the tensors' own addresses, as a card would, without guard zones."""
        values: list[Any] = []
        for argument, (_, kind) in zip(arguments, self.program.types, strict=True):
            values += _memref(argument.data_ptr()) if kind.startswith("*") else [_C_TYPES[kind](argument)]
        self._run((*grid, 1, 1)[:3], values)

    def touched(self) -> tuple[int, int]:
        """Bytes of its tensors read and written since the last call, each once. Needs `traced`."""
        ask = self.library.kernel_told
        ask.restype = ctypes.c_int64
        return ask(0), ask(1)

    def stay_inside(self, owned: Iterable[tuple[int, int]]) -> None:
        """Raises OutOfBounds if the kernel touched a byte outside these [begin, end) since the last call of `touched`.
        A card refuses an address that is nobody's (error 507035), also of a number that is not used. Needs `traced`."""
        joined: list[int] = []
        for begin, end in sorted(owned):
            if joined and begin <= joined[-1]:
                joined[-1] = max(end, joined[-1])
            else:
                joined += begin, end
        ask = self.library.kernel_strayed
        ask.restype = ctypes.c_int64
        if stray := ask((ctypes.c_int64 * len(joined))(*joined), ctypes.c_int64(len(joined) // 2)):
            self.touched()  # the next call starts anew
            edge = min(joined, key=lambda at: abs(at - stray))
            raise OutOfBounds(f"{self.program}: it touched byte {stray - edge:+} from an edge of its tensors' memory")

    def _run(self, sizes: Sequence[int], values: Sequence[Any]) -> None:
        counts = [ctypes.c_int32(size) for size in sizes]
        for x in range(sizes[0]):
            for y in range(sizes[1]):
                for z in range(sizes[2]):
                    place = [ctypes.c_int32(i) for i in (x, y, z)]
                    # the first two: a lock and a work space, which kernels of vector cores do not use
                    self.function(*_memref(0), *_memref(0), *values, *counts, *place)
                    self.library.kernel_release()


class OutOfBounds(RuntimeError):
    """A kernel wrote or read outside a tensor that it was given."""


class Guarded:
    """A copy of a tensor's bytes between two guard zones."""

    def __init__(self, name: str, tensor: torch.Tensor) -> None:
        if not tensor.is_contiguous():
            raise CompilerError(f"{name} must be contiguous: a kernel gets its address, not its strides")
        self.name, self.tensor = name, tensor
        self.raw = tensor.view(-1).view(torch.uint8)
        self.held = torch.full((self.raw.numel() + 2 * ZONE,), FILL, dtype=torch.uint8)
        self.inside = self.held[ZONE : ZONE + self.raw.numel()]
        self.inside.copy_(self.raw)

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def give_back(self) -> None:
        for zone, where in ((self.held[:ZONE], "before"), (self.held[ZONE + self.raw.numel() :], "behind")):
            if bool((zone != FILL).any()):
                raise OutOfBounds(f"{self.name}: the kernel wrote {where} it")
        self.raw.copy_(self.inside)


def _memref(address: int) -> list[Any]:
    """A memref of rank one in MLIR's calling convention: allocated, aligned, offset, size, stride."""
    pointer = ctypes.c_void_p(address)
    return [pointer, pointer, ctypes.c_int64(0), ctypes.c_int64(1 << 40), ctypes.c_int64(1)]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="ascend-compiler-")


def _shared_object(program: Program, linalg: str) -> Path:
    """Raises CompilerError if triton-ascend lowers the program to more than plain linalg, which a CPU cannot run."""
    lowered = run(tools().opt, linalg, PASSES)
    if lowered.status:
        raise CompilerError(f"{program} has no code on this machine's CPU: {lowered.reason()}")
    folder = Path(tempfile.mkdtemp(dir=_folder().name))
    text, library = folder / "kernel.mlir", folder / "kernel.so"
    text.write_text(lowered.output.replace("@malloc(", "@kernel_malloc("))
    (folder / "kernel.o").write_bytes(_object_code(text))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise CompilerError("there is no C compiler here (gcc or clang, or the one that CC names)")
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(folder / "kernel.o"), str(RUNTIME), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompilerError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return library


def _object_code(text: Path) -> bytes:
    """Object code of a module in LLVM's dialect, from the LLVM in triton-ascend."""
    from triton._C.libtriton import ir, llvm

    context = ir.context()
    ir.load_dialects(context)
    llvm.init_targets()
    module = llvm.to_module(ir.parse_mlir_module(str(text), context), llvm.context())
    llvm.attach_datalayout(module, TRIPLE, CPU, "")
    llvm.optimize_module(module, llvm.OPTIMIZE_O2)
    return llvm.translate_to_asm(str(module), TRIPLE, CPU, "", [], False, True)
