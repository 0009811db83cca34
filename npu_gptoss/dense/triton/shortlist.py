"""The token of the largest logit by a shortlist: bounds of all logits from eight bits, then the few that can win.

A row of the model's output is two rows of eight bits, `scale * (128 * high + low)`, so that all products are of
integers and their sums exact. What these rows leave out is a third part of the bound (`npu_gptoss.dense.shortlist`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs

# A logit is rounded to bfloat16 before it is compared, by at most 2 ** -9 of it, and the bounds are float32.
SLACK = tl.constexpr(2.0**-8)


@triton.jit
def split_kernel(
    normed,  # [tokens, HIDDEN]
    halves,  # [2 * BLOCK_T, PADDED] int8: the high halves, then the low ones
    norms,  # [tokens, 4] fp32: scale, |h|, |h - halves|
    HIDDEN: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(normed + row * HIDDEN + at, mask=at < HIDDEN, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / (127.0 * 128.0), 1e-30)
    whole = tl.floor(value / scale + 0.5)
    high = tl.floor(whole / 128.0 + 0.5)
    tl.store(halves + row * PADDED + at, high.to(tl.int8), mask=at < PADDED)
    tl.store(halves + (BLOCK_T + row) * PADDED + at, (whole - 128.0 * high).to(tl.int8), mask=at < PADDED)
    left = value - whole * scale
    tl.store(norms + row * 4, scale)
    tl.store(norms + row * 4 + 1, tl.sqrt(tl.sum(value * value, 0)))
    tl.store(norms + row * 4 + 2, tl.sqrt(tl.sum(left * left, 0)))


@triton.jit(do_not_specialize=["tokens"])
def bounds_kernel(
    rows, bounds,  # of the shortlist
    halves, norms,  # of `split_kernel`
    noise,  # [tokens, VOCAB] fp32, if HAS_NOISE
    upper,  # [tokens, VOCAB] fp32: no logit, with its noise, is larger
    lower,  # [tokens, blocks] fp32: the largest lower bound of a block
    tokens,
    VOCAB: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, HAS_NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    at = block * BLOCK_V + tl.arange(0, BLOCK_V)
    token = tl.arange(0, BLOCK_T)
    step = tl.load(bounds + at * 4)
    error = tl.load(bounds + at * 4 + 1)
    norm = tl.load(bounds + at * 4 + 2)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    lane = tl.arange(0, BLOCK_K)
    tile = rows + at.to(tl.int64)[:, None] * PADDED + lane[None, :]
    column = halves + token[None, :] * PADDED + lane[:, None]
    high = tl.zeros([BLOCK_V, BLOCK_T], tl.int32)
    low = tl.zeros([BLOCK_V, BLOCK_T], tl.int32)
    for _ in tl.range(0, PADDED // BLOCK_K, num_stages=STAGES):
        weight = tl.load(tile)
        high = tl.dot(weight, tl.load(column), high, out_dtype=tl.int32)
        low = tl.dot(weight, tl.load(column + BLOCK_T * PADDED), low, out_dtype=tl.int32)
        tile += BLOCK_K
        column += BLOCK_K
    real = token < tokens
    scale = tl.load(norms + token * 4, mask=real, other=0.0)
    length = tl.load(norms + token * 4 + 1, mask=real, other=0.0)
    left = tl.load(norms + token * 4 + 2, mask=real, other=0.0)
    logit = (high.to(tl.float32) * 128.0 + low.to(tl.float32)) * step[:, None] * scale[None, :]
    far = length[None, :] * error[:, None] + left[None, :] * norm[:, None]
    far += SLACK * (tl.abs(logit) + far)
    inside = (at < VOCAB)[:, None] & real[None, :]
    place = token.to(tl.int64)[None, :] * VOCAB + at[:, None]
    if HAS_NOISE:
        drawn = tl.load(noise + place, mask=inside, other=0.0)
        logit += drawn
        far += 1e-6 * tl.abs(drawn)
    logit = tl.where(inside, logit, float("-inf"))
    tl.store(lower + token * tl.num_programs(0) + block, tl.max(logit - far, 0), mask=real)
    tl.store(upper + place, logit + far, mask=inside)


@triton.jit(do_not_specialize=["blocks"])
def exact_kernel(
    normed,  # [tokens, HIDDEN]
    weight,  # [VOCAB, HIDDEN]
    noise, upper, lower,  # as above
    values,  # [tokens, parts] fp32
    ids,  # [tokens, parts] int32, VOCAB where no token of the part can win
    blocks,
    HIDDEN: tl.constexpr, VOCAB: tl.constexpr, BLOCKS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    HAS_NOISE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    each = tl.arange(0, BLOCKS)
    least = tl.max(tl.load(lower + row * blocks + each, mask=each < blocks, other=float("-inf")), 0)
    at = part * PART + tl.arange(0, PART)
    most = tl.load(upper + row * VOCAB + at, mask=at < VOCAB, other=float("-inf"))
    can_win = (most >= least) & (at < VOCAB)  # of a row with NaN no token
    lane = tl.arange(0, BLOCK)
    x = tl.load(normed + row * HIDDEN + lane, mask=lane < HIDDEN, other=0.0).to(tl.float32)
    value = tl.full([], float("-inf"), tl.float32)
    winner = tl.full([], VOCAB, tl.int32)
    token = tl.full([], -1, tl.int32)
    for _ in range(tl.sum(can_win.to(tl.int32), 0)):
        token = tl.min(tl.where(can_win & (at > token), at, VOCAB), 0)
        y = tl.load(weight + token.to(tl.int64) * HIDDEN + lane, mask=lane < HIDDEN, other=0.0).to(tl.float32)
        logit = tl.sum(x * y, 0).to(normed.dtype.element_ty).to(tl.float32)
        if HAS_NOISE:
            logit += tl.load(noise + row * VOCAB + token)
        better = logit > value  # the first of equals stays
        winner = tl.where(better, token, winner)
        value = tl.where(better, logit, value)
    tl.store(values + row * tl.num_programs(0) + part, value)
    tl.store(ids + row * tl.num_programs(0) + part, winner)
