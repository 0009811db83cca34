"""Launches of this package's Triton kernels: programmatic dependent launch where the GPU has it.

With it (Hopper and newer) a kernel may start while its predecessor still runs. It loads its weights, which no kernel of
a step writes, then waits (`wait_for_inputs`) before it touches anything else. So the stream of weights does not pause
between kernels. Every kernel of a chain must wait, or a write could overtake a reader two kernels back. Importing this
module imports triton.

Triton compiles a kernel anew for an integer that is 1, that 16 divides, or neither. Sizes that differ from step to step
are therefore named in `do_not_specialize`: `npu_gptoss.model.warm_up` meets every program that is left. Strides of the
model keep theirs, since loads are wide by them.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def supports_pdl(device: int | None) -> bool:
    return not INTERPRETED and device is not None and torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; in the interpreter a small number, so that programs loop more than once."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def launch_options(tensor: torch.Tensor, warps: int) -> dict[str, object]:
    """Keyword arguments of a launch on the tensor's device: the constexpr PDL, and the driver's attribute for it."""
    pdl = supports_pdl(tensor.device.index)
    return {"PDL": pdl, "num_warps": warps, **({"launch_pdl": True} if pdl else {})}


def launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], *, warps: int, **constants: Any) -> None:
    """Launches a kernel with the constexpr PDL on the device of its first argument."""
    kernel[grid](*arguments, **constants, **launch_options(arguments[0], warps))


@functools.cache
def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def arrivals(count: int, device: torch.device) -> torch.Tensor:
    """Returns at least `count` counters of programs that have arrived. Every launch leaves them at zero, so one stream
    needs no others; kept for good: graphs hold their address."""
    return _zeros(max(1024, triton.next_power_of_2(count)), device)


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Waits for the kernels before; called before reading what they wrote, and before the first write."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """The next kernel may start once all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
