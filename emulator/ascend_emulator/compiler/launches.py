"""Replaces `kernel[grid](…)` by Triton's interpreter, or by the lowered kernel on this machine's CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from ascend_emulator.compiler.host import HostKernel
from ascend_emulator.compiler.lowering import lower
from ascend_emulator.compiler.tools import CompilerError, tools

TYPES = {
    **{getattr(torch, f"int{bits}"): f"i{bits}" for bits in (8, 16, 32, 64)},
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}
# keywords of a launch that are not arguments of the kernel
OPTIONS = ("num_warps", "num_stages", "num_ctas", "multibuffer")
Launch = Callable[[Any, tuple[int, ...], dict[str, Any]], None]


def lowered(made: dict[Any, HostKernel], changed: Mapping[str, str] | None = None) -> Launch:
    """Builds each program once, into `made`. changed: another source for kernels of these names."""

    def launch(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        constants, given, types = parted(kernel, arguments)
        key = (kernel, *types.items(), *constants.items())
        if key not in made:
            source, before = (changed or {}).get(kernel.__name__), kernel.src
            kernel.src = source or before
            try:
                made[key] = HostKernel(lower(kernel, types, constants))
            finally:
                kernel.src = before
        made[key](grid, list(given.values()))

    return launch


def parted(kernel: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """The kernel's constants (for Triton also None and the integer 1), other arguments, and Triton's type names."""
    constants = {
        p.name: value
        for p in kernel.params
        if (value := arguments[p.name]) is None
        or p.is_constexpr
        or (type(value) is int and value == 1 and not p.do_not_specialize)
    }
    given = {name: value for name, value in arguments.items() if name not in constants}
    return constants, given, {name: _type(value) for name, value in given.items()}


def interpreted(kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    with _language_kept():
        InterpretedFunction(kernel.fn)[grid](**arguments)


@contextmanager
def _language_kept() -> Iterator[None]:
    """Undoes the interpreter's changes to `triton.language`, with which nothing could be compiled later."""
    import triton.language

    modules = [module for name, module in sys.modules.items() if f"{name}.".startswith("triton.language.")]
    classes = [triton.language.tensor, triton.language.dtype, triton.language.pointer_type, triton.language.block_type]
    before = [(owner, dict(vars(owner))) for owner in (*modules, *classes)]
    try:
        yield
    finally:
        for owner, names in before:
            for name in [name for name in vars(owner) if name not in names]:
                delattr(owner, name)
            for name, value in names.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


@contextmanager
def launching(launch: Launch) -> Iterator[None]:
    """Replaces every launch of a `triton.jit` function inside the block; its tensors are on the CPU."""
    tools()
    from triton.runtime.jit import JITFunction

    with mock.patch.object(JITFunction, "run", run_by(launch)):
        yield


def run_by(launch: Launch) -> Callable[..., None]:
    """Makes the replacement of `JITFunction.run`."""

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool = False, **keywords: Any) -> None:
        keywords = {name: value for name, value in keywords.items() if name not in OPTIONS}
        bound = self.signature.bind(*arguments, **keywords)
        bound.apply_defaults()
        sizes = grid(bound.arguments) if callable(grid) else grid
        launch(self, tuple(sizes) if isinstance(sizes, Sequence) else (sizes,), dict(bound.arguments))

    return run


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        if value.dtype not in TYPES:
            known = ", ".join(sorted(map(str, TYPES)))
            raise CompilerError(f"a lowered kernel takes no tensor of {value.dtype}; it takes {known}")
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if isinstance(value, float):
        return "fp32"
    raise CompilerError(f"{value!r} is neither a tensor nor a number")
