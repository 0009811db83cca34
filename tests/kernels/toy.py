"""Kernels of the operation `toy.add`, which the fixture `operation` defines."""

from __future__ import annotations

from collections.abc import Callable

from npu_gptoss.kernels.platform import Capability, Platform
from npu_gptoss.kernels.registry import ANY, Operation, register_kernel, registry
from npu_gptoss.kernels.selection import SelectedKernel, select_kernel
from npu_gptoss.kernels.signature import accepts, signature

CALL = signature(x="bfloat16")


def kernel(
    solution: str,
    *,
    priority: int = 4,
    x: object = ("float32", "bfloat16"),
    function: Callable | None = None,
    name: str | None = None,
    capability: Capability | None = None,
    **traits: object,
) -> None:
    """Takes any size by default, and answers with the name of its solution."""
    register_kernel(
        registry.operations["toy.add"],
        name=name,
        solution=solution,
        signatures=(accepts(x=x),),
        traits={"size": ANY, **traits},
        priority=priority,
        capability=capability or Capability(),
    )(function or (lambda x: solution))


def select(
    operation: Operation, size: int = 64, call: object = CALL, kind: str = "cpu", rows: int = 1, **more: object
) -> SelectedKernel:
    return select_kernel(operation, call, {"size": size, "rows": rows}, platform=Platform(kind), **more)
