"""Before the experts routing in one kernel, the k largest logits and the softmax over them; behind them the sum over a
token's slots, in their order, so that the result does not depend on who was first."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs
from npu_gptoss.moe.triton.device import local_expert


@triton.jit(do_not_specialize=["tokens"])
def route(
    logits,  # [tokens, EXPERTS]
    weights,  # [tokens, TOP_K] fp32, out
    ids,  # [tokens, TOP_K] int32, out
    tokens,
    TOP_K: tl.constexpr, BK: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Top-k and softmax; of equal logits the lower number comes first. NaN: whatever comes out, ids stay in range.

    The weights are summed in the order of the logits, so that their bits do not depend on BT.
    """
    wait_for_inputs(PDL)
    let_next_start(PDL)
    token = tl.program_id(0) * BT + tl.arange(0, BT)
    e = tl.arange(0, BE)
    mask = (token < tokens)[:, None] & (e < EXPERTS)[None, :]
    left = tl.load(logits + token[:, None] * EXPERTS + e[None, :], mask=mask, other=float("-inf")).to(tl.float32)
    left = tl.where(left != left, float("-inf"), left)
    free = mask
    k = tl.arange(0, BK)
    first = tl.max(left, 1)
    total = tl.zeros((BT,), tl.float32)
    shares = tl.zeros((BT, BK), tl.float32)
    numbers = tl.zeros((BT, BK), tl.int32)
    for i in tl.static_range(TOP_K):
        largest = tl.max(left, 1)
        winner = tl.min(tl.where(free & (left == largest[:, None]), e[None, :], BE), 1)
        winner = tl.minimum(winner, EXPERTS - 1)
        share = tl.exp(largest - first)
        total += share
        shares = tl.where((k == i)[None, :], share[:, None], shares)
        numbers = tl.where((k == i)[None, :], winner[:, None], numbers)
        taken = e[None, :] == winner[:, None]
        left = tl.where(taken, float("-inf"), left)
        free = free & (e[None, :] != winner[:, None])
    at = token[:, None] * TOP_K + k[None, :]
    mask = (token < tokens)[:, None] & (k < TOP_K)[None, :]
    tl.store(weights + at, shares / total[:, None], mask=mask)
    tl.store(ids + at, numbers, mask=mask)


@triton.jit
def combine(
    shares,  # [slots, SPLITS, R]
    topk_ids, expert_map,
    out,  # [tokens, R]
    TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, SPLITS: tl.constexpr, R: tl.constexpr, BR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Slots that were not computed (other ranks, padding) are not read: what stands there is whatever memory held.

    The next kernel may start, and load its weights, before this one's wait ends: it waits for this one in turn, which
    waited for the products.
    """
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BR + tl.arange(0, BR)
    sums = tl.zeros((BR,), tl.float32)
    for k in tl.static_range(TOP_K):
        slot = token * TOP_K + k
        computed = local_expert(topk_ids, expert_map, slot, True, HAS_MAP) >= 0
        for split in tl.static_range(SPLITS):
            at = shares + (slot * SPLITS + split) * R + row
            sums += tl.load(at, mask=computed & (row < R), other=0.0).to(tl.float32)
    tl.store(out + token * R + row, sums.to(out.dtype.element_ty), mask=row < R)
