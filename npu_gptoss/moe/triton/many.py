"""Prefill: slots sorted by expert on the device, then grouped products over the ragged groups.

The grid is an upper bound that depends on shapes alone: each expert has at most one tile of tokens that is not full.
LoRA adapters of single tokens (`adapters.py`) add to a tile before it is used: `shrink` has made A x of its slots.
A *slot* is one choice of one token: slot = token * top_k + k.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs
from npu_gptoss.moe.triton.device import add_low_rank, dot, finish, local_expert, product, swigluoai_bands


@triton.jit(do_not_specialize=["slots"], do_not_specialize_on_alignment=["rounds"])
def count(
    topk_ids, expert_map,
    counts,  # [programs, BE], out: how many of a program's rounds * BS slots each local expert has
    slots, rounds,
    HAS_MAP: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    e = tl.arange(0, BE)
    hits = tl.zeros((BE,), tl.int32)
    for each in range(rounds):
        s = (tl.program_id(0) * rounds + each) * BS + tl.arange(0, BS)
        expert = local_expert(topk_ids, expert_map, s, s < slots, HAS_MAP)
        hits += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * BE + e, hits)


@triton.jit(do_not_specialize=["slots", "programs"], do_not_specialize_on_alignment=["rounds"])
def place(
    topk_ids, expert_map, counts,
    order,  # [slots], out: slots by expert, within an expert in their order; what lies past the last group is undefined
    ends,  # [BE], out: where each expert's group ends
    slots, rounds, programs,
    HAS_MAP: tl.constexpr, BE: tl.constexpr, BS: tl.constexpr, BP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_inputs(PDL)
    let_next_start(PDL)
    own = tl.program_id(0)
    e = tl.arange(0, BE)
    all_counts = tl.zeros((BP, BE), tl.int32)
    earlier = tl.zeros((BP, BE), tl.int32)
    for first in range(0, programs, BP):
        p = first + tl.arange(0, BP)
        some = tl.load(counts + p[:, None] * BE + e[None, :], mask=(p < programs)[:, None], other=0)
        all_counts += some
        earlier += tl.where((p < own)[:, None], some, 0)
    total = tl.sum(all_counts, 0)
    end = tl.cumsum(total, 0)
    if own == 0:
        tl.store(ends + e, end)
    begin = end - total + tl.sum(earlier, 0)
    for each in range(rounds):
        s = (own * rounds + each) * BS + tl.arange(0, BS)
        expert = local_expert(topk_ids, expert_map, s, s < slots, HAS_MAP)
        hits = (expert[:, None] == e[None, :]).to(tl.int32)
        rank = tl.cumsum(hits, 0) - 1 + begin[None, :]
        tl.store(order + tl.sum(tl.where(hits > 0, rank, 0), 1), s, mask=expert >= 0)
        begin += tl.sum(hits, 0)


@triton.jit
def _tile(ends, number, BE: tl.constexpr, EXPERTS: tl.constexpr, BN: tl.constexpr):
    """The expert of the tile of that number in all groups (EXPERTS: none), its first place, the group's end."""
    e = tl.arange(0, BE)
    end = tl.load(ends + e)
    start = tl.where(e > 0, tl.load(ends + e - 1, mask=e > 0, other=0), 0)
    tiles = (end - start + BN - 1) // BN
    last = tl.cumsum(tiles, 0)
    expert = tl.sum(((last <= number) & (e < EXPERTS)).to(tl.int32))
    own = e == expert
    first = tl.sum(tl.where(own, start, 0)) + (number - tl.sum(tl.where(own, last - tiles, 0))) * BN
    return expert, first, tl.sum(tl.where(own, end, 0))


@triton.jit(do_not_specialize=["slots"])
def shrink(
    x,  # as in `grouped`
    order, ends,
    adapter,  # [tokens] int32: each token's adapter, negative for none
    a,  # [adapters, EXPERTS, RANK, K]
    low,  # [SHARES, slots, RANK] fp32, out: A x, of each share of the inputs; slots without an adapter are not written
    slots,
    GATE_UP: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr, ADAPTERS: tl.constexpr,
    RANK: tl.constexpr, K: tl.constexpr, SHARES: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The first factor of the adapters, for the slots of one tile."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    expert, first, end = _tile(ends, tl.program_id(0), BE, EXPERTS, BN)
    share = tl.program_id(1)
    if expert < EXPERTS:
        at = first + tl.arange(0, BN)
        valid = at < end
        slot = tl.load(order + at, mask=valid, other=0)
        own = tl.load(adapter + slot // TOP_K, mask=valid, other=-1)
        row = slot // TOP_K if GATE_UP else at
        r = tl.program_id(2) * BM + tl.arange(0, BM)
        for each in range(ADAPTERS):
            mine = own == each
            if tl.max(mine.to(tl.int32)) > 0:
                left = a + ((each * EXPERTS + expert).to(tl.int64) * RANK + r)[:, None] * K
                sums = tl.zeros((BM, BN), tl.float32)
                for step in range(share, (K + BK - 1) // BK, SHARES):
                    k = step * BK + tl.arange(0, BK)
                    w = tl.load(left + k[None, :], mask=(k < K)[None, :], other=0.0)
                    reads = mine[None, :] & (k < K)[:, None]
                    right = tl.load(x + row.to(tl.int64)[None, :] * K + k[:, None], mask=reads, other=0.0)
                    sums = dot(w, right, sums, NATIVE)
                to = low + (share * slots + slot).to(tl.int64)[None, :] * RANK + r[:, None]
                tl.store(to, sums, mask=mine[None, :])


@triton.jit(do_not_specialize=["slots"])
def grouped(
    x,  # [tokens, K]; without GATE_UP [slots, K] in the order of `order`
    order, ends, topk_weights, words, scales, bias,
    out,  # bfloat16: [slots, R // 2] in the order of `order` (GATE_UP), else [slots, R]
    limit,
    adapter, b, low, slots,  # of `add_low_rank`, read where there are ADAPTERS
    GATE_UP: tl.constexpr, FORMAT: tl.constexpr, TOP_K: tl.constexpr, EXPERTS: tl.constexpr, BE: tl.constexpr,
    ADAPTERS: tl.constexpr, RANK: tl.constexpr, SHARES: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, UNROLL: tl.constexpr, HALVES: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The first projection and the activation (GATE_UP); the second with bias and routing weight, back in the order of
    the slots. Adapters add to a projection's result before either."""
    wait_for_inputs(PDL)
    let_next_start(PDL)
    ROW_TILES: tl.constexpr = (R + BM - 1) // BM
    number = tl.program_id(0) // ROW_TILES
    row_tile = tl.program_id(0) % ROW_TILES
    expert, first, end = _tile(ends, number, BE, EXPERTS, BN)
    if expert < EXPERTS:
        at = first + tl.arange(0, BN)
        valid = at < end
        first_row = row_tile * BM
        if GATE_UP:
            slot = tl.load(order + at, mask=valid, other=0)
            source = slot // TOP_K
        else:
            source = at
        sums = product(
            x, source, valid, words, scales, expert, first_row, 0,
            FORMAT, R, K, BM, BN, UNROLL, HALVES, 1, STAGES, NATIVE,
        )  # fmt: skip
        if not GATE_UP:
            slot = tl.load(order + at, mask=valid, other=0)
        sums = finish(sums, scales, bias, expert, first_row, 0, FORMAT, R, BM)
        if ADAPTERS > 0:
            own = tl.load(adapter + slot // TOP_K, mask=valid, other=-1)
            sums = add_low_rank(
                sums, own, b, low, slot, slots, expert, first_row, ADAPTERS, EXPERTS, RANK, SHARES, R, BM, NATIVE
            )
        if GATE_UP:
            result = swigluoai_bands(sums, limit, BM, BN)
            row = row_tile * (BM // 2) + tl.arange(0, BM // 2)
            target = out + at.to(tl.int64)[None, :] * (R // 2)
            mask = valid[None, :] & (row < R // 2)[:, None]
        else:
            result = sums * tl.load(topk_weights + slot, mask=valid, other=0.0)[None, :]
            row = first_row + tl.arange(0, BM)
            target = out + slot.to(tl.int64)[None, :] * R
            mask = valid[None, :] & (row < R)[:, None]
        tl.store(target + row[:, None], result.to(out.dtype.element_ty), mask=mask)
