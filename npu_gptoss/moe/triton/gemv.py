"""A single token's experts in MXFP4 as matrix-vector products: no tensor cores, no lists, no combination.

One column would waste seven eighths of a tensor core's tile and make a program wait for one small load after the other.
Here a program takes a few rows of an expert whole, so that all its loads are on their way at once; the second product
sums over the token's experts before it stores, weighted.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.moe.activation import ALPHA
from npu_gptoss.moe.triton.device import local_expert, open_mxfp4


@triton.jit
def row_products(
    x,  # [K] bfloat16
    words,
    scales,
    expert,
    first_row,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,  # rows; divides 64
    CHUNK: tl.constexpr,  # tiles of 64 inputs at once
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr = 64,
    WIDTH: tl.constexpr = 16,
    MOST_ROWS: tl.constexpr = 128,
):
    """[BM] fp32: rows of one expert's matrix times x. The layout is `layout.py`'s."""
    TILES: tl.constexpr = (K + 63) // 64
    PAIRS: tl.constexpr = (TILES + 1) // 2
    ROW_TILES: tl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)
    row_tile = expert.to(tl.int64) * ROW_TILES + first_row // ROWS
    word = words + row_tile * (TILES * ROWS * WIDTH) + first_row % ROWS * WIDTH
    scale = scales + row_tile * (PAIRS * ROWS) + first_row % ROWS
    row = tl.arange(0, BM)
    lane = tl.arange(0, WIDTH)
    sums = tl.zeros((CHUNK, BM, WIDTH), tl.float32)
    for chunk in tl.static_range((TILES + CHUNK - 1) // CHUNK):
        tile = chunk * CHUNK + tl.arange(0, CHUNK)
        exists = tile < TILES
        w = tl.load(
            word + tile[:, None, None] * (ROWS * WIDTH) + row[None, :, None] * WIDTH + lane[None, None, :],
            mask=exists[:, None, None],
            other=0,
        )
        exponents = tl.load(scale + (tile // 2)[:, None] * ROWS + row[None, :], mask=exists[:, None], other=0)
        exponents = exponents >> ((tile % 2) * 16)[:, None]
        first = tl.broadcast_to(((exponents & 0xFF) * 0x00800080)[:, :, None], (CHUNK, BM, WIDTH))
        second = tl.broadcast_to((((exponents >> 8) & 0xFF) * 0x00800080)[:, :, None], (CHUNK, BM, WIDTH))
        a, b, c, d = open_mxfp4(w, first, second, NATIVE)
        k = tile[:, None, None] * 64 + lane[None, None, :]
        sums += a.to(tl.float32) * tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums += b.to(tl.float32) * tl.load(x + k + 16, mask=k + 16 < K, other=0.0).to(tl.float32)
        sums += c.to(tl.float32) * tl.load(x + k + 32, mask=k + 32 < K, other=0.0).to(tl.float32)
        sums += d.to(tl.float32) * tl.load(x + k + 48, mask=k + 48 < K, other=0.0).to(tl.float32)
    return tl.sum(tl.sum(sums, 2), 0)


@triton.jit
def ask_for_rows(
    words,
    expert,
    first_row,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BLOCK: tl.constexpr,  # at least the tiles of a row
    LINES: tl.constexpr,  # of 128 bytes, that BM rows have in a tile
    ROWS: tl.constexpr = 64,
    MOST_ROWS: tl.constexpr = 128,
):
    """Lets a program's rows of an expert come into the L2 cache; waits for nothing."""
    TILES: tl.constexpr = (K + 63) // 64
    ROW_TILES: tl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)
    row_tile = expert.to(tl.int64) * ROW_TILES + first_row // ROWS
    start = (words + row_tile * (TILES * ROWS * 16) + first_row % ROWS * 16).to(tl.pointer_type(tl.int8))
    tile = tl.minimum(tl.arange(0, BLOCK), TILES - 1)
    line = start + tile[:, None] * (ROWS * 32) + tl.arange(0, LINES)[None, :] * 128
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [line], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def gate_up_one(
    x,  # [K]
    topk_ids,  # [top_k]
    expert_map,
    words,
    scales,
    bias,
    inner,  # [top_k, R // 2], out
    limit,
    HAS_MAP: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    BAND: tl.constexpr = 8,
    ALPHA: tl.constexpr = ALPHA,
):
    """A program a slot and a band: 8 rows of gate and the 8 of up that belong to them."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.program_id(1)
    expert = local_expert(topk_ids, expert_map, slot, True, HAS_MAP)
    if expert >= 0:
        first_row = tl.program_id(0) * (2 * BAND)
        sums = row_products(x, words, scales, expert, first_row, R, K, 2 * BAND, CHUNK, NATIVE)
        sums += tl.load(bias + expert * R + first_row + tl.arange(0, 2 * BAND)).to(tl.float32)
        gate, up = tl.split(tl.permute(tl.reshape(sums, (2, BAND)), (1, 0)))
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1) * gate / (1 + tl.exp(gate * -ALPHA))
        tl.store(inner + slot * (R // 2) + tl.program_id(0) * BAND + tl.arange(0, BAND), out.to(inner.dtype.element_ty))


@triton.jit
def down_one(
    inner,  # [top_k, K]
    topk_weights,  # [top_k] fp32
    topk_ids,  # [top_k]
    expert_map,
    words,
    scales,
    bias,
    out,  # [R]
    HAS_MAP: tl.constexpr,
    TOP_K: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    NATIVE: tl.constexpr,
    PDL: tl.constexpr,
    LEAST_CHUNK: tl.constexpr = 64,
):
    """A program a few rows of the result, over all of the token's experts.

    AHEAD: asks for its weights while `gate_up_one` runs. That started its successor after its own wait, so the token's
    experts are known by then; only `inner` is not.
    """
    first_row = tl.program_id(0) * BM
    if PDL:
        if AHEAD:
            for slot in tl.static_range(TOP_K):
                expert = local_expert(topk_ids, expert_map, slot, True, HAS_MAP)
                if expert >= 0:
                    ask_for_rows(words, expert, first_row, R, K, BM, LEAST_CHUNK, (BM * 32 + 127) // 128)
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = first_row + tl.arange(0, BM)
    total = tl.zeros((BM,), tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = local_expert(topk_ids, expert_map, slot, True, HAS_MAP)
        if expert >= 0:
            sums = row_products(inner + slot * K, words, scales, expert, first_row, R, K, BM, CHUNK, NATIVE)
            sums += tl.load(bias + expert * R + row, mask=row < R, other=0.0).to(tl.float32)
            total += sums * tl.load(topk_weights + slot)
    tl.store(out + row, total.to(out.dtype.element_ty), mask=row < R)
