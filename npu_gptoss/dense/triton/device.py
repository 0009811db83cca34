"""Pieces of device code that appear in several kernels of this family."""

from __future__ import annotations

import triton
import triton.language as tl


def halves(size: int) -> tuple[int, int]:
    """Two powers of two that cover `size`: a whole row in two tiles wastes less than in one."""
    first = max(triton.next_power_of_2(size) // 2, 1)
    return first, triton.next_power_of_2(max(size - first, 1))


@triton.jit
def prefetch(pointer, size, ON: tl.constexpr):
    """Brings `size` bytes (a multiple of 16, like the address) into the L2 cache. One thread asks, nobody waits."""
    if ON:
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,r",
            [pointer, size],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def prefetch_share(tensor, size, ON: tl.constexpr):
    """This program's share of `size` bytes (a multiple of 16) at `tensor`, which later kernels read."""
    if ON:
        share = (size // 16 + tl.num_programs(0) - 1) // tl.num_programs(0) * 16
        start = tl.program_id(0) * share
        if start < size:
            begin = tensor.to(tl.pointer_type(tl.int8)) + start
            prefetch(begin, tl.minimum(share, size - start).to(tl.int32), ON)


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
