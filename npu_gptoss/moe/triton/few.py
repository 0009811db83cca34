"""Decode: a program takes one tile of rows of one expert and all tokens of this expert, without a sort.

Each distinct expert's weights are read once. `assign` lists the slots of each expert; the
programs of the products are numbered by the chosen experts, and programs beyond these end at once. A single token
needs no lists: its slots are its experts. Scratch rows that no program wrote are never read: the combination asks for
each slot whether it was computed.

A *slot* is one choice of one token: slot = token * top_k + k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs
from npu_gptoss.moe.triton.device import finish, local_expert, product, swigluoai_bands


@triton.jit(do_not_specialize=["slots"])
def assign(
    topk_ids,  # [slots]
    expert_map,  # [global experts] or unused
    lists,  # [experts, slots], out: the slots of each local expert, in their order
    counts,  # [experts], out: how many they are
    slots,
    HAS_MAP: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program an expert."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    own = tl.program_id(0)
    s = tl.arange(0, BS)
    hit = (local_expert(topk_ids, expert_map, s, s < slots, HAS_MAP) == own).to(tl.int32)
    tl.store(lists + own * slots + tl.cumsum(hit, 0) - 1, s, mask=hit > 0)
    tl.store(counts + own, tl.sum(hit))


@triton.jit
def _mine(topk_ids, expert_map, counts, HAS_MAP: tl.constexpr, ONE: tl.constexpr, EXPERTS: tl.constexpr,
          BE: tl.constexpr):  # fmt: skip
    """This program's expert and how many slots it has; 0 where fewer experts were chosen than there are programs. ONE:
    of a single token, whose experts are all different."""
    own = tl.program_id(1)
    if ONE:
        expert = local_expert(topk_ids, expert_map, own, True, HAS_MAP)
        count = (expert >= 0).to(tl.int32)
    else:
        e = tl.arange(0, BE)
        all_counts = tl.load(counts + e, mask=e < EXPERTS, other=0)
        mine = (all_counts > 0) & (tl.cumsum((all_counts > 0).to(tl.int32), 0) - 1 == own)
        expert = tl.sum(tl.where(mine, e, 0))
        count = tl.sum(tl.where(mine, all_counts, 0))
    return expert, count


@triton.jit
def _slots_of(lists, expert, slots, at, valid, ONE: tl.constexpr):
    """The expert's slots at these places of its list."""
    if ONE:
        slot = tl.program_id(1) + at * 0
    else:
        slot = tl.load(lists + expert * slots + at, mask=valid, other=0)
    return slot


@triton.jit(do_not_specialize=["slots"])
def gate_up(
    x,  # [tokens, K]
    topk_ids,  # [slots], read where ONE
    expert_map,  # [global experts] or unused
    lists,  # from `assign`, read where not ONE
    counts, words, scales, bias,
    inner,  # [slots, R // 2], out
    slots, limit,
    FORMAT: tl.constexpr, TOP_K: tl.constexpr, HAS_MAP: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr, UNROLL: tl.constexpr,
    HALVES: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The first projection and the activation."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    first_row = tl.program_id(0) * BM
    row = tl.program_id(0) * (BM // 2) + tl.arange(0, BM // 2)
    expert, count = _mine(topk_ids, expert_map, counts, HAS_MAP, ONE, EXPERTS, BE)
    for done in range(0, count, BN):
        at = done + tl.arange(0, BN)
        valid = at < count
        slot = _slots_of(lists, expert, slots, at, valid, ONE)
        sums = product(
            x, slot // TOP_K, valid, words, scales, expert, first_row, 0,
            FORMAT, R, K, BM, BN, UNROLL, HALVES, 1, STAGES, NATIVE,
        )  # fmt: skip
        sums = finish(sums, scales, bias, expert, first_row, 0, FORMAT, R, BM)
        out = swigluoai_bands(sums, limit, BM, BN).to(inner.dtype.element_ty)
        mask = valid[None, :] & (row < R // 2)[:, None]
        tl.store(inner + slot[None, :] * (R // 2) + row[:, None], out, mask=mask)


@triton.jit(do_not_specialize=["slots"])
def down(
    inner,  # [slots, K]
    topk_ids, expert_map, lists, counts,
    topk_weights,  # [slots] fp32
    words, scales, bias,
    shares,  # [slots, SPLITS, R] fp32, out
    slots,
    FORMAT: tl.constexpr, HAS_MAP: tl.constexpr, ONE: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr, UNROLL: tl.constexpr, HALVES: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The second projection with bias and routing weight.

    With PDL ids and lists may be read before the wait: `gate_up` launches its dependents after its own wait, so the
    kernel that wrote them has ended.
    """
    first_row = tl.program_id(0) * BM
    split = tl.program_id(2)
    row = first_row + tl.arange(0, BM)
    expert, count = _mine(topk_ids, expert_map, counts, HAS_MAP, ONE, EXPERTS, BE)
    wait_for_inputs(PDL)
    let_next_start(PDL)
    for done in range(0, count, BN):
        at = done + tl.arange(0, BN)
        valid = at < count
        slot = _slots_of(lists, expert, slots, at, valid, ONE)
        sums = product(
            inner, slot, valid, words, scales, expert, first_row, split,
            FORMAT, R, K, BM, BN, UNROLL, HALVES, SPLITS, STAGES, NATIVE,
        )  # fmt: skip
        weight = tl.load(topk_weights + slot, mask=valid, other=0.0)
        out = finish(sums, scales, bias, expert, first_row, split, FORMAT, R, BM) * weight[None, :]
        mask = valid[None, :] & (row < R)[:, None]
        tl.store(shares + (slot * SPLITS + split)[None, :] * R + row[:, None], out, mask=mask)
