"""Residual add and RMSNorm, one program a row."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import load_sum, normed
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def add_norm_kernel(
    residual,  # [tokens, HIDDEN]
    delta,  # the same, if HAS_DELTA
    new_residual,  # the same, written if HAS_DELTA
    norm_weight,  # [HIDDEN] fp32
    out,  # [tokens, HIDDEN]
    eps,
    HIDDEN: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = residual.dtype.element_ty
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < HIDDEN
    norm_a = tl.load(norm_weight + at_a)
    norm_b = tl.load(norm_weight + at_b, mask=in_b, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64) * HIDDEN
    hidden_a = load_sum(residual + row, delta + row, at_a, at_a < HIDDEN, HAS_DELTA)
    hidden_b = load_sum(residual + row, delta + row, at_b, in_b, HAS_DELTA)
    if HAS_DELTA:
        tl.store(new_residual + row + at_a, hidden_a.to(DTYPE))
        tl.store(new_residual + row + at_b, hidden_b.to(DTYPE), mask=in_b)
    squares = tl.sum(hidden_a * hidden_a, 0) + tl.sum(hidden_b * hidden_b, 0)
    inverse = tl.rsqrt(squares / HIDDEN + eps)
    tl.store(out + row + at_a, normed(hidden_a, inverse, norm_a, DTYPE).to(DTYPE))
    tl.store(out + row + at_b, normed(hidden_b, inverse, norm_b, DTYPE).to(DTYPE), mask=in_b)
