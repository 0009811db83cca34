"""Attention of decode rows straight from the paged cache: a program a row, a key/value head and a share of the keys.

All query heads of a key head are the rows of one product, so every key is read once. The keys are split over programs;
each leaves its sums in memory and counts itself in, and the one that arrives last adds them up, with the sink, which no
other has seen. A row whose keys fit one share is finished by its only program. The counters return to zero.

Of a row's keys only the newest is written in this step. Where the lengths are the device's own (SETTLED), a program
loads its first keys while the kernel before still runs, and then reads the results of that kernel: query and newest
key.

An FP8 cache is read as words of four values (PACKED). Triton's own conversion takes three instructions a value, at a
quarter of the pace, and reads the values' bytes one by one: 1.5 times as long at 32 x 8192 keys on an H200.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.attention.triton.device import product, softmax_step
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def add_up(
    sums,  # [SPLITS, HEADS, DIM]
    extremes,  # [SPLITS, 2, HEADS]
    sinks,  # [HEADS]
    out,  # [HEADS, DIM], heads `out_head` apart
    used, out_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The `used` shares and the sink, in their order. Unrolled: the loads of CHUNK shares are under way at once."""
    member = tl.arange(0, GROUP)
    real = member < HEADS
    dim = tl.arange(0, DIM)[None, :]
    largest = tl.load(sinks + member, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
    weight = tl.full([GROUP], 1.0, tl.float32)
    result = tl.zeros([GROUP, DIM], tl.float32)
    for first in tl.range(0, used, CHUNK):
        for one in tl.static_range(CHUNK):
            share = first + one
            there = real & (share < used)
            place = extremes + share * 2 * HEADS + member
            # from the second level of cache: other programs wrote it, and the first may hold what was there before
            top = tl.load(place, mask=there, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(place + HEADS, mask=there, other=0.0, cache_modifier=".cg")
            place = sums + (share * HEADS + member)[:, None] * DIM + dim
            total = tl.load(place, mask=there[:, None], other=0.0, cache_modifier=".cg")
            new = tl.maximum(largest, top)
            shrink = tl.exp2(largest - new)
            grow = tl.exp2(top - new)
            weight = weight * shrink + part * grow
            result = result * shrink[:, None] + total * grow[:, None]
            largest = new
    result = result / weight[:, None]
    tl.store(out + member[:, None] * out_head + dim, result.to(out.dtype.element_ty), mask=real[:, None])


@triton.jit
def places(table, position, inside, head, dim, KV_HEADS: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr):
    """[keys, DIM] where a head's keys (or values) of these positions stand in the cache."""
    page = tl.load(table + position // PAGE, mask=inside, other=0).to(tl.int64)
    return ((page * PAGE + position % PAGE) * KV_HEADS + head)[:, None] * STRIDE + dim[None, :]


# E4M3's bits, a byte each, as bfloat16: the exponent's bias is 127, not 7, so the value is 2^-120 as large.
OPEN_FP8 = tl.constexpr("""
{
.reg .b32 a, b, c, d;
prmt.b32 a, $4, 0, 0x1404;
prmt.b32 b, $4, 0, 0x3424;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
and.b32 a, a, 0x80008000;
and.b32 b, b, 0x80008000;
lop3.b32 a, c, 0x07F007F0, a, 0xEA;
lop3.b32 b, d, 0x07F007F0, b, 0xEA;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}
""")


@triton.jit
def _byte(words, NUMBER: tl.constexpr):
    bits = words >> (8 * NUMBER)
    return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True)


@triton.jit
def opened(words, PACKED: tl.constexpr, WIDE: tl.constexpr):
    """Keys or values as they are; where PACKED, [keys, DIM] of [keys, DIM // 4] int32: 2^-120 as large as they are."""
    if PACKED:
        if WIDE:
            a, b, c, d = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
        else:
            a, b, c, d = tl.inline_asm_elementwise(
                OPEN_FP8,
                "=h,=h,=h,=h,r",
                [words],
                dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
                is_pure=True,
                pack=1,
            )
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (words.shape[0], 4 * words.shape[1]))
    return words


@triton.jit
def taken(q, key, value, inside, scale, result, largest, weight, PACKED: tl.constexpr, WIDE: tl.constexpr):
    """The running sums with these keys in them. PACKED: the values' is 2^-56 as large; no product falls below fp32."""
    key, value = opened(key, PACKED, WIDE), opened(value, PACKED, WIDE)
    scores = tl.where(inside[None, :], product(q, key.T, WIDE), float("-inf"))
    return softmax_step(scores, scale, value, result, largest, weight, q.dtype, WIDE, 2.0**64 if PACKED else 1.0)


@triton.jit(do_not_specialize=["limit", "table_stride"])
def decode_kernel(
    query,  # [rows, heads, DIM], strides query_row, query_head
    key_cache,  # [blocks, PAGE, KV_HEADS, DIM], heads STRIDE apart; where PACKED, int32 and DIM // 4
    value_cache,
    sinks,  # [heads]
    out,  # [rows, heads, DIM], strides out_row, out_head
    lengths,  # [requests] int32
    block_table,  # [requests, blocks], rows `table_stride` apart
    row_of,  # [programs] int32, where MAPPED
    request_of,
    sums,  # [programs, KV_HEADS, SPLITS, HEADS, DIM] float32
    extremes,  # [programs, KV_HEADS, SPLITS, 2, HEADS] float32: largest score, sum of weights
    arrived,  # [programs, KV_HEADS] int32, zeros
    scale,  # of the scores, times log2 e
    limit,  # no row has more keys
    table_stride, query_row, query_head, out_row, out_head,
    HEADS: tl.constexpr,  # query heads of a key head
    GROUP: tl.constexpr,  # the power of two that holds them
    ROWS: tl.constexpr,  # the same, but at least 16
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr,
    BEFORE: tl.constexpr,  # keys seen before a row's own; negative: all
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, MAPPED: tl.constexpr,
    SETTLED: tl.constexpr,  # lengths, table and all keys but a row's newest are older than the kernel before
    PACKED: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    head = tl.program_id(0)
    split = tl.program_id(1)
    program = tl.program_id(2)
    member = tl.arange(0, ROWS)
    real = member < HEADS
    dim = tl.arange(0, DIM)
    stored = tl.arange(0, DIM // 4 if PACKED else DIM)
    sink = tl.load(sinks + head * HEADS + member, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
    if not SETTLED:
        wait_for_inputs(PDL)
    if MAPPED:
        row = tl.load(row_of + program).to(tl.int64)
        request = tl.load(request_of + program).to(tl.int64)
    else:
        row = program.to(tl.int64)
        request = row
    length = tl.minimum(tl.load(lengths + request), limit)
    target = out + row * out_row + (head * HEADS + member)[:, None] * out_head + dim[None, :]
    if BEFORE < 0:
        first = 0
    else:
        first = tl.maximum(length - 1 - BEFORE, 0)
    tiles = tl.cdiv(length - first, BLOCK_N)
    share = tl.cdiv(tiles, SPLITS)
    used = tl.cdiv(tiles, tl.maximum(share, 1))
    if length <= 0:
        if SETTLED:
            wait_for_inputs(PDL)
        if split == 0:
            tl.store(target, tl.zeros([ROWS, DIM], out.dtype.element_ty), mask=real[:, None])
    elif split < used:
        begin = first + split * share * BLOCK_N
        end = tl.minimum(begin + share * BLOCK_N, length)
        table = block_table + request * table_stride
        position = begin + tl.arange(0, BLOCK_N)
        inside = position < end
        source = places(table, position, inside, head, stored, KV_HEADS, STRIDE, PAGE)
        older = inside
        if SETTLED:
            older = position < tl.minimum(end, length - 1)
        key = tl.load(key_cache + source, mask=older[:, None], other=0.0)
        value = tl.load(value_cache + source, mask=older[:, None], other=0.0)
        if SETTLED:
            wait_for_inputs(PDL)
            newest = inside & (position == length - 1)
            key = tl.load(key_cache + source, mask=newest[:, None], other=key)
            value = tl.load(value_cache + source, mask=newest[:, None], other=value)
        q = tl.load(
            query + row * query_row + (head * HEADS + member)[:, None] * query_head + dim[None, :],
            mask=real[:, None],
            other=0.0,
        )
        if PACKED:  # powers of two cost no bit
            q = (q.to(tl.float32) * 2.0**64).to(q.dtype)
            scale *= 2.0**56
        largest = tl.full([ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        result = tl.zeros([ROWS, DIM], tl.float32)
        result, largest, weight = taken(q, key, value, inside, scale, result, largest, weight, PACKED, WIDE)
        for at in tl.range(begin + BLOCK_N, end, BLOCK_N):
            position = at + tl.arange(0, BLOCK_N)
            inside = position < end
            source = places(table, position, inside, head, stored, KV_HEADS, STRIDE, PAGE)
            key = tl.load(key_cache + source, mask=inside[:, None], other=0.0)
            value = tl.load(value_cache + source, mask=inside[:, None], other=0.0)
            result, largest, weight = taken(q, key, value, inside, scale, result, largest, weight, PACKED, WIDE)
        if PACKED:
            result *= 2.0**56
        if used == 1:
            final = tl.maximum(largest, sink)
            shrink = tl.exp2(largest - final)
            result = result * (shrink / (weight * shrink + tl.exp2(sink - final)))[:, None]
            tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None])
        else:
            series = (program * KV_HEADS + head).to(tl.int64)
            mine = series * SPLITS + split
            tl.store(sums + (mine * HEADS + member)[:, None] * DIM + dim[None, :], result, mask=real[:, None])
            tl.store(extremes + mine * 2 * HEADS + member, largest, mask=real)
            tl.store(extremes + (mine * 2 + 1) * HEADS + member, weight, mask=real)
            tl.debug_barrier()  # all threads' sums, before one thread says that they are there
            before_me = tl.atomic_add(arrived + series, 1, sem="acq_rel")
            if before_me == used - 1:
                tl.store(arrived + series, 0)
                add_up(
                    sums + series * SPLITS * HEADS * DIM,
                    extremes + series * SPLITS * 2 * HEADS,
                    sinks + head * HEADS,
                    out + row * out_row + head * HEADS * out_head,
                    used,
                    out_head,
                    HEADS,
                    GROUP,
                    DIM,
                    min(SPLITS, 8),
                )
