"""Prompts: keys and values from their cache blocks into contiguous memory, then causal attention of the rows over them.

Gathering costs a few microseconds where attention takes a millisecond, and gives its loop whole tiles of the query's
dtype at computed addresses, which the tensor memory accelerator can fetch, for every block size. Attention has a
program a tile of rows and a key/value head.

A tile is BLOCK_Q positions of all query heads of one key head, BLOCK_Q * GROUP rows: every key that it reads serves the
whole group, and the part of the last key tiles that the causal mask hides is small. The sink is where the online
softmax starts: largest score = sink, sum of weights = 1, no value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.attention.triton.device import product, softmax_step
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit(do_not_specialize=["table_stride"])
def gather_kernel(
    key_cache,  # [blocks, PAGE, KV_HEADS, DIM], heads STRIDE apart
    value_cache,
    block_table,  # [requests, blocks], rows `table_stride` apart
    requests,  # [prompts, 6], see plan.Prompts
    keys_out,  # [KV_HEADS, total, DIM]
    values_out, total, table_stride,
    PAGE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr,
    TILE_KEYS: tl.constexpr,  # to which the keys of a prompt are padded
    BLOCK: tl.constexpr,  # keys of one program; divides TILE_KEYS
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    fields = requests + tl.program_id(2) * 6
    request = tl.load(fields).to(tl.int64)
    first_key = tl.load(fields + 4)
    length = tl.load(fields + 3) + tl.load(fields + 2) - first_key
    place = tl.load(fields + 5).to(tl.int64)
    begin = tl.program_id(1) * BLOCK
    if begin < tl.cdiv(length, TILE_KEYS) * TILE_KEYS:
        head = tl.program_id(0)  # the heads of a key lie side by side, so they are read at about the same time
        at = begin + tl.arange(0, BLOCK)
        real = at < length
        position = first_key + at
        page = tl.load(block_table + request * table_stride + position // PAGE, mask=real, other=0).to(tl.int64)
        dim = tl.arange(0, DIM)[None, :]
        source = ((page * PAGE + position % PAGE) * KV_HEADS + head)[:, None] * STRIDE + dim
        target = (head * total + place + at)[:, None] * DIM + dim
        # zeros behind the last key: the loop multiplies them by 0, and 0 * NaN would be NaN
        tl.store(keys_out + target, tl.load(key_cache + source, mask=real[:, None], other=0.0))
        tl.store(values_out + target, tl.load(value_cache + source, mask=real[:, None], other=0.0))


@triton.jit
def prefill_kernel(
    query,  # [rows, heads, DIM], strides query_row, query_head
    keys,  # descriptor of [KV_HEADS * total, DIM], tiles of BLOCK_N keys
    values,
    sinks,  # [heads]
    out,  # [rows, heads, DIM], strides out_row, out_head
    requests,  # [prompts, 6], see plan.Prompts
    tiles,  # [tiles, 2]
    scale,  # of the scores, times log2 e
    total, query_row, query_head, out_row, out_head,
    HEADS: tl.constexpr,  # query heads of a key head
    GROUP: tl.constexpr,  # the power of two that holds them
    KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    BEFORE: tl.constexpr,  # keys seen before a row's own; negative: all
    BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    ROWS: tl.constexpr = BLOCK_Q * GROUP
    entry = tiles + tl.program_id(0) // KV_HEADS * 2
    head = tl.program_id(0) % KV_HEADS
    fields = requests + tl.load(entry) * 6
    first_row = tl.load(fields + 1)
    rows = tl.load(fields + 2)
    position = tl.load(fields + 3)
    first_key = tl.load(fields + 4)
    place = tl.load(fields + 5) + head * total
    begin = tl.load(entry + 1) * BLOCK_Q

    member = tl.arange(0, ROWS) % GROUP
    within = begin + tl.arange(0, ROWS) // GROUP
    real = (within < rows) & (member < HEADS)
    dim = tl.arange(0, DIM)[None, :]
    row = (first_row + within).to(tl.int64)
    q_head = head * HEADS + member
    q = tl.load(query + (row * query_row + q_head * query_head)[:, None] + dim, mask=real[:, None], other=0.0)

    # keys are counted from first_key on
    row_at = position - first_key + within
    lowest = position - first_key + begin
    highest = tl.minimum(lowest + BLOCK_Q, position - first_key + rows)  # one past the last key that any row sees
    largest = tl.load(sinks + q_head, mask=member < HEADS, other=0.0).to(tl.float32) * 1.4426950408889634
    weight = tl.full([ROWS], 1.0, tl.float32)
    result = tl.zeros([ROWS, DIM], tl.float32)
    if BEFORE < 0:
        clear = (lowest + 1) // BLOCK_N * BLOCK_N  # every row sees all keys before it
        for at in tl.range(0, clear, BLOCK_N):
            scores = product(q, keys.load([place + at, 0]).T, WIDE)
            value = values.load([place + at, 0])
            result, largest, weight = softmax_step(scores, scale, value, result, largest, weight, q.dtype, WIDE)
    else:
        clear = tl.maximum(lowest - BEFORE, 0) // BLOCK_N * BLOCK_N
    for at in tl.range(clear, highest, BLOCK_N):
        scores = product(q, keys.load([place + at, 0]).T, WIDE)
        key_at = at + tl.arange(0, BLOCK_N)
        seen = key_at[None, :] <= row_at[:, None]
        if BEFORE >= 0:
            seen &= key_at[None, :] >= row_at[:, None] - BEFORE
        scores = tl.where(seen, scores, float("-inf"))
        value = values.load([place + at, 0])
        result, largest, weight = softmax_step(scores, scale, value, result, largest, weight, q.dtype, WIDE)
    result = result / weight[:, None]
    target = out + (row * out_row + q_head * out_head)[:, None] + dim
    tl.store(target, result.to(out.dtype.element_ty), mask=real[:, None])
