"""Kernels that read no weight matrix.

Residual add and RMSNorm, a program a row. RoPE of queries and keys, and the write of keys and values to the cache,
from the packed projections. The largest logit of each row, unless one is damaged, in two launches that fill the chip.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import load_sum, normed, turned
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def add_norm_kernel(
    residual,  # [tokens, HIDDEN]
    delta,  # the same, if HAS_DELTA
    new_residual,  # [tokens, HIDDEN] fp32, written if HAS_DELTA
    norm_weight,  # [HIDDEN] fp32
    out,  # [tokens, HIDDEN]
    eps,
    HIDDEN: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, HAS_DELTA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = out.dtype.element_ty
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
        tl.store(new_residual + row + at_a, hidden_a)
        tl.store(new_residual + row + at_b, hidden_b, mask=in_b)
    squares = tl.sum(hidden_a * hidden_a, 0) + tl.sum(hidden_b * hidden_b, 0)
    inverse = tl.rsqrt(squares / HIDDEN + eps)
    tl.store(out + row + at_a, normed(hidden_a, inverse, norm_a, DTYPE).to(DTYPE))
    tl.store(out + row + at_b, normed(hidden_b, inverse, norm_b, DTYPE).to(DTYPE), mask=in_b)


@triton.jit(do_not_specialize=["slots", "real_tokens"])
def rope_cache_kernel(
    packed,  # [tokens, HEADS + 2 * KV_HEADS, DIM]
    cos_sin,  # [positions, DIM] fp32
    positions,  # [tokens] int64
    slots,  # [>= real tokens]; negative: not written
    query,  # [tokens, HEADS, DIM]
    key_cache,  # [slots, KV_HEADS, DIM], heads STRIDE apart
    value_cache, real_tokens,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
    GROUP: tl.constexpr,  # heads computed together; divides HEADS and KV_HEADS
    GROUPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    member = tl.arange(0, GROUP)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    place = tl.load(positions + token) * DIM + tl.arange(0, HALF)
    cos = tl.load(cos_sin + place)[None, :]
    sin = tl.load(cos_sin + place + HALF)[None, :]
    slot = tl.load(slots + token, mask=token < real_tokens, other=-1).to(tl.int64)
    for group in tl.static_range(GROUPS):
        head = (tl.program_id(1) * GROUPS + group) * GROUP
        source = packed + (token * ALL + head + member) * DIM + lane
        first = tl.load(source)
        second = tl.load(source + HALF)
        if head < HEADS + KV_HEADS:
            first, second = turned(first, second, cos, sin, packed.dtype.element_ty)
        if head < HEADS:
            out = query + (token * HEADS + head + member) * DIM + lane
            tl.store(out, first)
            tl.store(out + HALF, second)
        elif slot >= 0:
            out = key_cache + (slot * KV_HEADS + head - HEADS + member) * STRIDE + lane
            if head >= HEADS + KV_HEADS:
                out = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS + member) * STRIDE + lane
            tl.store(out, first)
            tl.store(out + HALF, second)


@triton.jit
def partial_kernel(
    logits,  # [rows, VOCAB]
    values,  # [rows, parts] fp32
    ids,  # [rows, parts] int32; -1: one is NaN or infinity
    parts,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    sound = value < float("inf")  # NaN compares false
    clean = tl.where(sound, value, float("-inf"))
    largest = tl.max(clean, 0)
    winner = tl.min(tl.where(clean == largest, at, VOCAB), 0)  # the first of equals
    tl.store(values + row * parts + part, largest)
    tl.store(ids + row * parts + part, tl.where(tl.min(sound.to(tl.int32), 0) == 1, winner, -1))


@triton.jit
def final_kernel(
    values, ids,
    out,  # [rows] int64, `stride` apart
    parts, stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < parts
    value = tl.load(values + row * parts + at, mask=inside, other=float("-inf"))
    index = tl.load(ids + row * parts + at, mask=inside, other=VOCAB)
    largest = tl.max(value, 0)
    winner = tl.min(tl.where((value == largest) & inside, index, VOCAB), 0)
    chosen = (tl.min(index, 0) >= 0) & (largest > float("-inf"))
    tl.store(out + row * stride, tl.where(chosen, winner, -1).to(tl.int64))
