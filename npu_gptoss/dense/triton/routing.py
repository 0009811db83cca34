"""Residual add, RMSNorm, router, top-k and softmax of a few rows in one launch.

The experts of a token are spread over programs, each of which norms the row again (it lies in the L2 cache); the last
program of a token to arrive takes the top-k. Its counter is back at zero when the kernel ends. A row that holds NaN
(vLLM's runs before a capture leave memory as it was) gets experts that are there, and NaN for weights.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import load_sum, normed
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def router_kernel(
    residual,  # [tokens, HIDDEN]
    delta,  # the same, if HAS_DELTA
    new_residual,  # [tokens, HIDDEN] fp32, written if HAS_DELTA
    norm_weight,  # [HIDDEN] fp32
    weight,  # [EXPERTS, HIDDEN]
    bias,  # [EXPERTS]
    live,  # [tokens], if HAS_LIVE: 0 marks a padding row, whose ids become -1 and whose weights 0
    normed_out,  # [tokens, HIDDEN]
    topk_weights,  # [tokens, TOP_K] fp32
    topk_ids,  # [tokens, TOP_K] int32
    logits,  # [tokens, EXPERTS] fp32, scratch
    arrived,  # [tokens] int32, scratch, zero
    eps,
    HIDDEN: tl.constexpr, EXPERTS: tl.constexpr,
    SHARE: tl.constexpr,  # experts of a program; divides EXPERTS
    TOP_K: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_DELTA: tl.constexpr, HAS_LIVE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    DTYPE: tl.constexpr = weight.dtype.element_ty
    PROGRAMS: tl.constexpr = EXPERTS // SHARE
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    expert = part * SHARE + tl.arange(0, SHARE)
    at_a = tl.arange(0, BLOCK_A)
    at_b = BLOCK_A + tl.arange(0, BLOCK_B)
    in_b = at_b < HIDDEN
    weight_a = tl.load(weight + expert[:, None] * HIDDEN + at_a[None, :])
    weight_b = tl.load(weight + expert[:, None] * HIDDEN + at_b[None, :], mask=in_b[None, :], other=0.0)
    norm_a = tl.load(norm_weight + at_a)
    norm_b = tl.load(norm_weight + at_b, mask=in_b, other=0.0)
    shift = tl.load(bias + expert).to(tl.float32)
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = token * HIDDEN
    hidden_a = load_sum(residual + row, delta + row, at_a, at_a < HIDDEN, HAS_DELTA)
    hidden_b = load_sum(residual + row, delta + row, at_b, in_b, HAS_DELTA)
    squares = tl.sum(hidden_a * hidden_a, 0) + tl.sum(hidden_b * hidden_b, 0)
    inverse = tl.rsqrt(squares / HIDDEN + eps)
    x_a = normed(hidden_a, inverse, norm_a, DTYPE)
    x_b = normed(hidden_b, inverse, norm_b, DTYPE)
    if part == 0:
        if HAS_DELTA:
            tl.store(new_residual + row + at_a, hidden_a)
            tl.store(new_residual + row + at_b, hidden_b, mask=in_b)
        tl.store(normed_out + row + at_a, x_a.to(DTYPE))
        tl.store(normed_out + row + at_b, x_b.to(DTYPE), mask=in_b)
    value = tl.sum(weight_a.to(tl.float32) * x_a[None, :], 1) + tl.sum(weight_b.to(tl.float32) * x_b[None, :], 1)
    value = (value + shift).to(DTYPE).to(tl.float32)  # router logits are rounded, ties included
    if PROGRAMS == 1:
        take = tl.full((), 0, tl.int32)
    else:
        tl.store(logits + token * EXPERTS + expert, value)
        tl.debug_barrier()  # all of this program's logits are on their way before its arrival is counted
        take = tl.atomic_add(arrived + token, 1, sem="acq_rel") - (PROGRAMS - 1)
    if take == 0:
        at = tl.arange(0, BLOCK_E)
        if PROGRAMS > 1:
            left = tl.load(logits + token * EXPERTS + at, mask=at < EXPERTS, other=float("-inf"), cache_modifier=".cg")
            tl.store(arrived + token, 0)
        else:
            left = value
        left = tl.where(left != left, float("-inf"), left)
        free = at < EXPERTS
        slot = tl.arange(0, BLOCK_K)
        best = tl.full((BLOCK_K,), float("-inf"), tl.float32)
        ids = tl.full((BLOCK_K,), -1, tl.int32)
        for k in tl.static_range(TOP_K):
            largest = tl.max(left, 0)
            winner = tl.min(tl.where(free & (left == largest), at, EXPERTS - 1), 0)  # the first of equals
            best = tl.where(slot == k, largest, best)
            ids = tl.where(slot == k, winner, ids)
            left = tl.where(at == winner, float("-inf"), left)
            free = free & (at != winner)
        share = tl.exp(best - tl.max(best, 0))
        share = share / tl.sum(share, 0)
        if HAS_LIVE:
            real = tl.load(live + token) > 0
            share = tl.where(real, share, 0.0)
            ids = tl.where(real, ids, -1)
        tl.store(topk_weights + token * TOP_K + slot, share, mask=slot < TOP_K)
        tl.store(topk_ids + token * TOP_K + slot, ids, mask=slot < TOP_K)
