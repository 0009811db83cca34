"""What the Triton kernels of this family share: launching, and the pieces of device code that appear in several.

PDL (programmatic dependent launch, Hopper): a kernel may start while its predecessor still runs. It loads its weights,
which no kernel of a step writes, then waits (`gdc_wait`) before it touches anything else. So the stream of weights does
not pause between kernels. Every kernel of a chain must wait, or a write could overtake a reader two kernels back.
"""

from __future__ import annotations

import functools
import os

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@functools.cache
def supports_pdl(device: int | None) -> bool:
    return not INTERPRETED and device is not None and torch.cuda.get_device_capability(device) >= (9, 0)


def launch_options(tensor: torch.Tensor, warps: int) -> dict[str, object]:
    """Keyword arguments of a launch: the constexpr PDL, and what makes the driver launch that way."""
    pdl = supports_pdl(tensor.device.index)
    return {"PDL": pdl, "num_warps": warps, **({"launch_pdl": True} if pdl else {})}


def halves(size: int) -> tuple[int, int]:
    """Two powers of two that cover `size`: a whole row in two tiles wastes less than in one."""
    first = max(triton.next_power_of_2(size) // 2, 1)
    return first, triton.next_power_of_2(max(size - first, 1))


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Before anything is read that another kernel of the step wrote, and before anything is written."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_start(PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def load_sum(residual, delta, offsets, mask, HAS_DELTA: tl.constexpr):
    """residual + delta, rounded to the residual stream's dtype, as fp32."""
    hidden = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        hidden += tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    return hidden.to(residual.dtype.element_ty).to(tl.float32)


@triton.jit
def normed(hidden, scale, weight, DTYPE: tl.constexpr):
    """fp32 in, rounded to DTYPE as RMSNorm's result is, fp32 out."""
    return (weight * (hidden * scale)).to(DTYPE).to(tl.float32)


@triton.jit
def turned(first, second, cos, sin, DTYPE: tl.constexpr):
    """RoPE of the pairs (first, second) in DTYPE: each product is rounded, as the model was trained."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    cos = cos.to(tl.float32)
    sin = sin.to(tl.float32)
    a_cos = (a * cos).to(DTYPE).to(tl.float32)
    b_sin = (b * sin).to(DTYPE).to(tl.float32)
    b_cos = (b * cos).to(DTYPE).to(tl.float32)
    a_sin = (a * sin).to(DTYPE).to(tl.float32)
    return (a_cos - b_sin).to(DTYPE), (b_cos + a_sin).to(DTYPE)
