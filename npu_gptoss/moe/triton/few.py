"""Decode: a program takes one tile of rows of one expert and finds the tokens of that expert itself, without a sort.

Each distinct expert's weights are read once. Programs of experts that nobody chose, or that live on another rank, end
at once. Scratch rows that nobody wrote are never read: the combination asks for each slot whether it was computed.

A *slot* is one choice of one token: slot = token * top_k + k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.moe.triton.device import finish, local_expert, prefetch, product, swigluoai_bands
from npu_gptoss.moe.triton.layout import ROWS


@triton.jit
def _mine(topk_ids, expert_map, slots, HAS_MAP: tl.constexpr, BY_SLOT: tl.constexpr, BS: tl.constexpr):
    """This program's expert, how many slots chose it (0: nothing to do), and each slot's place among those, else -1.

    BY_SLOT: programs are numbered by slots, which is fewer than experts; the first slot of an expert stands for all.
    """
    own = tl.program_id(1)
    s = tl.arange(0, BS)
    expert = local_expert(topk_ids, expert_map, s, s < slots, HAS_MAP)
    if BY_SLOT:
        mine = tl.sum(tl.where(s == own, expert, 0))
        earlier = tl.sum(((expert == mine) & (s < own)).to(tl.int32))
        hit = ((expert == mine) & (mine >= 0) & (earlier == 0)).to(tl.int32)
    else:
        mine = own
        hit = (expert == mine).to(tl.int32)
    place = tl.where(hit > 0, tl.cumsum(hit, 0) - 1, -1)
    return mine, tl.sum(hit), place


@triton.jit
def gate_up(
    x,  # [tokens, K]
    topk_ids,  # [slots]
    expert_map,  # [global experts] or unused
    words,
    scales,
    bias,
    inner,  # [slots, R // 2], out
    slots,
    limit,
    FORMAT: tl.constexpr,
    TOP_K: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ONE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    UNROLL: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The first projection and the activation. ONE: a single token, whose experts are all different."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_row = tl.program_id(0) * BM
    column = tl.arange(0, BN)
    row = tl.program_id(0) * (BM // 2) + tl.arange(0, BM // 2)
    if ONE:
        slot = tl.program_id(1)
        expert = local_expert(topk_ids, expert_map, slot, True, HAS_MAP)
        if expert >= 0:
            sums = product(
                x, column * 0, column < 1, words, scales, expert, first_row,
                FORMAT, R, K, BM, BN, UNROLL, SUMS, STAGES, NATIVE,
            )  # fmt: skip
            sums = finish(sums, scales, bias, expert, first_row, FORMAT, R, BM)
            out = swigluoai_bands(sums, limit, BM, BN).to(inner.dtype.element_ty)
            mask = (column < 1)[None, :] & (row < R // 2)[:, None]
            tl.store(inner + (slot * (R // 2) + column * 0)[None, :] + row[:, None], out, mask=mask)
    else:
        expert, count, place = _mine(topk_ids, expert_map, slots, HAS_MAP, BY_SLOT, BS)
        s = tl.arange(0, BS)
        for done in range(0, count, BN):
            slot = tl.sum(tl.where(place[:, None] == (done + column)[None, :], s[:, None], 0), 0)
            valid = done + column < count
            sums = product(
                x, slot // TOP_K, valid, words, scales, expert, first_row,
                FORMAT, R, K, BM, BN, UNROLL, SUMS, STAGES, NATIVE,
            )  # fmt: skip
            sums = finish(sums, scales, bias, expert, first_row, FORMAT, R, BM)
            out = swigluoai_bands(sums, limit, BM, BN).to(inner.dtype.element_ty)
            mask = valid[None, :] & (row < R // 2)[:, None]
            tl.store(inner + slot[None, :] * (R // 2) + row[:, None], out, mask=mask)


@triton.jit
def down(
    inner,  # [slots, K]
    topk_ids,
    expert_map,
    topk_weights,  # [slots] fp32
    words,
    scales,
    bias,
    shares,  # [slots, R] fp32, out
    slots,
    FORMAT: tl.constexpr,
    HAS_MAP: tl.constexpr,
    BY_SLOT: tl.constexpr,
    ONE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BS: tl.constexpr,
    UNROLL: tl.constexpr,
    SUMS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
    PREFETCH: tl.constexpr,  # bytes of a tile's row of weights to ask for before `inner` is there; 0: none
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr = ROWS,
):
    """The second projection with bias and routing weight.

    With PDL the ids may be read before the wait: `gate_up` launches its dependents after its own wait, so whoever wrote
    them has ended.
    """
    first_row = tl.program_id(0) * BM
    column = tl.arange(0, BN)
    row = first_row + tl.arange(0, BM)
    if ONE:
        slot = tl.program_id(1)
        expert = local_expert(topk_ids, expert_map, slot, True, HAS_MAP)
        if PDL:
            if PREFETCH > 0:
                if expert >= 0:
                    ROW_TILES: tl.constexpr = (R + ROWS - 1) // ROWS
                    LINES: tl.constexpr = BM * PREFETCH // 128
                    line = tl.minimum(tl.arange(0, triton.next_power_of_2(LINES)), LINES - 1)
                    begin = expert.to(tl.int64) * (ROW_TILES * ROWS) + first_row
                    prefetch(words.to(tl.pointer_type(tl.uint8)) + begin * PREFETCH + line * 128)
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if expert >= 0:
            sums = product(
                inner, slot + column * 0, column < 1, words, scales, expert, first_row,
                FORMAT, R, K, BM, BN, UNROLL, SUMS, STAGES, NATIVE,
            )  # fmt: skip
            out = finish(sums, scales, bias, expert, first_row, FORMAT, R, BM) * tl.load(topk_weights + slot)
            mask = (column < 1)[None, :] & (row < R)[:, None]
            tl.store(shares + (slot * R + column * 0)[None, :] + row[:, None], out, mask=mask)
    else:
        expert, count, place = _mine(topk_ids, expert_map, slots, HAS_MAP, BY_SLOT, BS)
        if PDL:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        s = tl.arange(0, BS)
        for done in range(0, count, BN):
            slot = tl.sum(tl.where(place[:, None] == (done + column)[None, :], s[:, None], 0), 0)
            valid = done + column < count
            sums = product(
                inner, slot, valid, words, scales, expert, first_row,
                FORMAT, R, K, BM, BN, UNROLL, SUMS, STAGES, NATIVE,
            )  # fmt: skip
            weight = tl.load(topk_weights + slot, mask=valid, other=0.0)
            out = finish(sums, scales, bias, expert, first_row, FORMAT, R, BM) * weight[None, :]
            mask = valid[None, :] & (row < R)[:, None]
            tl.store(shares + slot[None, :] * R + row[:, None], out, mask=mask)
