"""Pieces of device code that appear in several kernels of this family."""

from __future__ import annotations

import triton
import triton.language as tl


def halves(size: int) -> tuple[int, int]:
    """Two powers of two that cover `size`: a whole row in two tiles wastes less than in one."""
    first = max(triton.next_power_of_2(size) // 2, 1)
    return first, triton.next_power_of_2(max(size - first, 1))


@triton.jit
def load_sum(residual, delta, offsets, mask, HAS_DELTA: tl.constexpr):
    """residual + delta in fp32."""
    hidden = tl.load(residual + offsets, mask=mask, other=0.0).to(tl.float32)
    if HAS_DELTA:
        hidden += tl.load(delta + offsets, mask=mask, other=0.0).to(tl.float32)
    return hidden


@triton.jit
def normed(hidden, scale, weight, DTYPE: tl.constexpr):
    """fp32 in, rounded to DTYPE as RMSNorm's result is, fp32 out."""
    return (weight * (hidden * scale)).to(DTYPE).to(tl.float32)


@triton.jit
def turned(first, second, cos, sin, DTYPE: tl.constexpr):
    """RoPE of the pairs (first, second), rounded to DTYPE once; cos and sin fp32."""
    a = first.to(tl.float32)
    b = second.to(tl.float32)
    return (a * cos - b * sin).to(DTYPE), (b * cos + a * sin).to(DTYPE)
