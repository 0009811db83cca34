"""Projections of one row, as matrix-vector products.

A decode step of one token reads every weight once, so the number of bytes in flight decides the speed. Few
programs, each with many rows of the weight: all of them need the whole input, which would otherwise cost as much as the
weights. A program loads its first rows before it waits for its inputs, and each next ones before it computes with those
it has.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import load_sum, normed, turned
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def load_rows(weight, row, at_a, at_b, in_b, present, IN: tl.constexpr):
    """Rows [n, IN] of the weight in two tiles; zeros where there is none."""
    first = weight + row[:, None].to(tl.int64) * IN
    return (
        tl.load(first + at_a[None, :], mask=present[:, None], other=0.0),
        tl.load(first + at_b[None, :], mask=present[:, None] & in_b[None, :], other=0.0),
    )


@triton.jit
def products(tile_a, tile_b, x_a, x_b):
    """[n] fp32: each row times x."""
    return tl.sum(tile_a.to(tl.float32) * x_a[None, :], 1) + tl.sum(tile_b.to(tl.float32) * x_b[None, :], 1)


@triton.jit(do_not_specialize=["slots", "real_tokens"])
def qkv_kernel(
    residual,  # [tokens, HIDDEN]
    delta,  # [tokens, HIDDEN]
    new_residual,  # [tokens, HIDDEN] fp32, written by program 0 (if HAS_DELTA)
    norm_weight,  # [HIDDEN] fp32
    weight,  # [(HEADS + 2 * KV_HEADS) * DIM, HIDDEN]
    bias,  # [(HEADS + 2 * KV_HEADS) * DIM]
    cos_sin,  # [positions, DIM] fp32
    positions,  # [tokens] int64
    slots,  # [>= real tokens] int64 or int32; negative: not written
    query,  # [tokens, HEADS, DIM]
    key_cache,  # [slots, KV_HEADS, DIM], heads STRIDE apart
    value_cache, real_tokens, eps,
    HIDDEN: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
    PAIRS: tl.constexpr,  # RoPE pairs (i, i + DIM / 2) of one head that a program computes at a time
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, HAS_DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    PARTS: tl.constexpr = HALF // PAIRS  # of a head
    GROUPS: tl.constexpr = (HEADS + 2 * KV_HEADS) * PARTS
    DTYPE: tl.constexpr = weight.dtype.element_ty
    token = tl.program_id(1).to(tl.int64)
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < HIDDEN
    lanes = tl.arange(0, PAIRS)
    everywhere = lanes >= 0
    group = tl.program_id(0)
    low = group // PARTS * DIM + group % PARTS * PAIRS + lanes
    low_a, low_b = load_rows(weight, low, at_a, at_b, in_b, everywhere, HIDDEN)
    high_a, high_b = load_rows(weight, low + HALF, at_a, at_b, in_b, everywhere, HIDDEN)
    norm_a = tl.load(norm_weight + at_a)
    norm_b = tl.load(norm_weight + at_b, mask=in_b, other=0.0)
    # Positions and slots are the step's, not the chain's: whoever wrote them had ended before the chain began.
    table = cos_sin + tl.load(positions + token) * DIM
    slot = tl.load(slots + token, mask=token < real_tokens, other=-1).to(tl.int64)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = token * HIDDEN
    hidden_a = load_sum(residual + row, delta + row, at_a, at_a < HIDDEN, HAS_DELTA)
    hidden_b = load_sum(residual + row, delta + row, at_b, in_b, HAS_DELTA)
    if HAS_DELTA and tl.program_id(0) == 0:
        tl.store(new_residual + row + at_a, hidden_a)
        tl.store(new_residual + row + at_b, hidden_b, mask=in_b)
    squares = tl.sum(hidden_a * hidden_a, 0) + tl.sum(hidden_b * hidden_b, 0)
    inverse = tl.rsqrt(squares / HIDDEN + eps)
    x_a = normed(hidden_a, inverse, norm_a, DTYPE)
    x_b = normed(hidden_b, inverse, norm_b, DTYPE)
    for group in range(tl.program_id(0), GROUPS, tl.num_programs(0)):
        head = group // PARTS
        lane = group % PARTS * PAIRS + lanes
        low = head * DIM + lane
        shift_low = tl.load(bias + low).to(tl.float32)
        shift_high = tl.load(bias + low + HALF).to(tl.float32)
        cos = tl.load(table + lane)
        sin = tl.load(table + lane + HALF)
        following = group + tl.num_programs(0)
        next_low = following // PARTS * DIM + following % PARTS * PAIRS + lanes
        present = everywhere & (following < GROUPS)
        next_low_a, next_low_b = load_rows(weight, next_low, at_a, at_b, in_b, present, HIDDEN)
        next_high_a, next_high_b = load_rows(weight, next_low + HALF, at_a, at_b, in_b, present, HIDDEN)
        sum_low = products(low_a, low_b, x_a, x_b)
        sum_high = products(high_a, high_b, x_a, x_b)
        first = (sum_low + shift_low).to(DTYPE)
        second = (sum_high + shift_high).to(DTYPE)
        if head < HEADS + KV_HEADS:
            first, second = turned(first, second, cos, sin, DTYPE)
        if head < HEADS:
            out = query + (token * HEADS + head) * DIM + lane
            tl.store(out, first)
            tl.store(out + HALF, second)
        elif slot >= 0:
            out = key_cache + (slot * KV_HEADS + head - HEADS) * STRIDE + lane
            if head >= HEADS + KV_HEADS:
                out = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * STRIDE + lane
            tl.store(out, first)
            tl.store(out + HALF, second)
        low_a = next_low_a
        low_b = next_low_b
        high_a = next_high_a
        high_b = next_high_b


@triton.jit
def linear_kernel(
    x,  # [tokens, IN]
    weight,  # [rows, IN]
    bias,  # [rows], if HAS_BIAS
    residual,  # [tokens, rows], if HAS_RESIDUAL
    out,  # [tokens, rows]
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,  # that a program computes at a time
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr,
    AGAIN: tl.constexpr,  # whether a program computes more than ROWS rows
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < IN
    offsets = tl.arange(0, ROWS)
    row = tl.program_id(0) * ROWS + offsets
    tile_a, tile_b = load_rows(weight, row, at_a, at_b, in_b, row < rows, IN)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    x_a = tl.load(x + token * IN + at_a).to(tl.float32)
    x_b = tl.load(x + token * IN + at_b, mask=in_b, other=0.0).to(tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = start + offsets
        inside = row < rows
        place = token * rows + row
        if HAS_BIAS:
            shift = tl.load(bias + row, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            before = tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
        if AGAIN:
            upcoming = row + tl.num_programs(0) * ROWS
            next_a, next_b = load_rows(weight, upcoming, at_a, at_b, in_b, upcoming < rows, IN)
        value = products(tile_a, tile_b, x_a, x_b)
        if HAS_BIAS:
            value += shift
        if HAS_RESIDUAL:
            value += before
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
        if AGAIN:
            tile_a = next_a
            tile_b = next_b
