"""Projections of one row, as matrix-vector products: a program has some rows of the weight.

A decode step of one token reads every weight once, so what counts is how many bytes are on their way. A program loads
its weights before it waits for its inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import load_sum, normed, turned
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def qkv_kernel(
    residual,  # [tokens, HIDDEN]
    delta,  # [tokens, HIDDEN]
    new_residual,  # [tokens, HIDDEN], written by program 0 (if HAS_DELTA)
    norm_weight,  # [HIDDEN] fp32
    weight,  # [(HEADS + 2 * KV_HEADS) * DIM, HIDDEN] in the dtype of the rows, or fp8
    weight_scale,  # [(HEADS + 2 * KV_HEADS) * DIM] fp32, if SCALED
    bias,  # [(HEADS + 2 * KV_HEADS) * DIM]
    cos_sin,  # [positions, DIM]
    positions,  # [tokens] int64
    slots,  # [>= real tokens] int64 or int32; negative: not written
    query,  # [tokens, HEADS, DIM]
    key_cache,  # [slots, KV_HEADS, DIM]
    value_cache,
    real_tokens,
    eps,
    HIDDEN: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAIRS: tl.constexpr,  # RoPE pairs (i, i + DIM / 2) of one head to a program
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    DTYPE: tl.constexpr = residual.dtype.element_ty
    program = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    head = program // (HALF // PAIRS)
    lane = (program % (HALF // PAIRS)) * PAIRS + tl.arange(0, PAIRS)
    low = head * DIM + lane
    high = low + HALF
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < HIDDEN
    low_a = tl.load(weight + low[:, None] * HIDDEN + at_a[None, :])
    high_a = tl.load(weight + high[:, None] * HIDDEN + at_a[None, :])
    low_b = tl.load(weight + low[:, None] * HIDDEN + at_b[None, :], mask=in_b[None, :], other=0.0)
    high_b = tl.load(weight + high[:, None] * HIDDEN + at_b[None, :], mask=in_b[None, :], other=0.0)
    norm_a = tl.load(norm_weight + at_a)
    norm_b = tl.load(norm_weight + at_b, mask=in_b, other=0.0)
    bias_low = tl.load(bias + low).to(tl.float32)
    bias_high = tl.load(bias + high).to(tl.float32)
    if SCALED:
        scale_low = tl.load(weight_scale + low)
        scale_high = tl.load(weight_scale + high)
    # Positions and slots are the step's, not the chain's: whoever wrote them had ended before the chain began.
    place = tl.load(positions + token) * DIM + lane
    cos = tl.load(cos_sin + place)
    sin = tl.load(cos_sin + place + HALF)
    slot = tl.load(slots + token, mask=token < real_tokens, other=-1).to(tl.int64)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = token * HIDDEN
    hidden_a = load_sum(residual + row, delta + row, at_a, at_a < HIDDEN, HAS_DELTA)
    hidden_b = load_sum(residual + row, delta + row, at_b, in_b, HAS_DELTA)
    if HAS_DELTA and program == 0:
        tl.store(new_residual + row + at_a, hidden_a.to(DTYPE))
        tl.store(new_residual + row + at_b, hidden_b.to(DTYPE), mask=in_b)
    squares = tl.sum(hidden_a * hidden_a, 0) + tl.sum(hidden_b * hidden_b, 0)
    inverse = tl.rsqrt(squares / HIDDEN + eps)
    x_a = normed(hidden_a, inverse, norm_a, DTYPE)[None, :]
    x_b = normed(hidden_b, inverse, norm_b, DTYPE)[None, :]
    sum_low = tl.sum(low_a.to(tl.float32) * x_a, 1) + tl.sum(low_b.to(tl.float32) * x_b, 1)
    sum_high = tl.sum(high_a.to(tl.float32) * x_a, 1) + tl.sum(high_b.to(tl.float32) * x_b, 1)
    if SCALED:
        sum_low *= scale_low
        sum_high *= scale_high
    first = (sum_low + bias_low).to(DTYPE)
    second = (sum_high + bias_high).to(DTYPE)
    if head < HEADS + KV_HEADS:
        first, second = turned(first, second, cos, sin, DTYPE)
    if head < HEADS:
        out = query + (token * HEADS + head) * DIM + lane
        tl.store(out, first)
        tl.store(out + HALF, second)
    elif slot >= 0:
        if head < HEADS + KV_HEADS:
            out = key_cache + (slot * KV_HEADS + head - HEADS) * DIM + lane
            tl.store(out, first)
            tl.store(out + HALF, second)
        else:
            out = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + lane
            tl.store(out, first)
            tl.store(out + HALF, second)


@triton.jit
def linear_kernel(
    x,  # [tokens, IN]
    weight,  # [rows, IN] in the dtype of the rows, or fp8
    weight_scale,  # [rows] fp32, if SCALED
    bias,  # [rows], if HAS_BIAS
    residual,  # [tokens, rows], if HAS_RESIDUAL
    out,  # [tokens, rows]
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < IN
    weight_a = tl.load(weight + row[:, None] * IN + at_a[None, :], mask=inside[:, None], other=0.0)
    weight_b = tl.load(weight + row[:, None] * IN + at_b[None, :], mask=inside[:, None] & in_b[None, :], other=0.0)
    if HAS_BIAS:
        shift = tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        scale = tl.load(weight_scale + row, mask=inside, other=0.0)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x_a = tl.load(x + token * IN + at_a).to(tl.float32)[None, :]
    x_b = tl.load(x + token * IN + at_b, mask=in_b, other=0.0).to(tl.float32)[None, :]
    value = tl.sum(weight_a.to(tl.float32) * x_a, 1) + tl.sum(weight_b.to(tl.float32) * x_b, 1)
    if SCALED:
        value *= scale
    if HAS_BIAS:
        value += shift
    place = token * rows + row
    if HAS_RESIDUAL:
        value = value.to(DTYPE).to(tl.float32)
        value += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, value.to(DTYPE), mask=inside)
