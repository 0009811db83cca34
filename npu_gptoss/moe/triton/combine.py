"""The sum over a token's slots, in their order, so that the result does not depend on who was first."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs
from npu_gptoss.moe.triton.device import local_expert


@triton.jit
def combine(
    shares,  # [slots, SPLITS, R]
    topk_ids,
    expert_map,
    out,  # [tokens, R]
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    SPLITS: tl.constexpr,
    R: tl.constexpr,
    BR: tl.constexpr,
    PDL: tl.constexpr,
):
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
