"""Causal attention of prompt rows over gathered keys: a program a tile of rows and a key/value head.

A tile is BLOCK_Q positions of all query heads of one key head, BLOCK_Q * GROUP rows: every key that it reads serves the
whole group, and the part of the last key tiles that the causal mask hides is small. The sink is where the online
softmax starts: largest score = sink, sum of weights = 1, no value.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.attention.triton.device import product, softmax_step
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


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
    total,
    query_row,
    query_head,
    out_row,
    out_head,
    HEADS: tl.constexpr,  # query heads of a key head
    GROUP: tl.constexpr,  # the power of two that holds them
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BEFORE: tl.constexpr,  # keys seen before a row's own; negative: all
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
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
