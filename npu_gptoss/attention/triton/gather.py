"""Keys and values of prompts from their cache blocks into contiguous memory, [kv_heads, keys, head_dim] each.

That costs a few microseconds where attention takes a millisecond, and gives the attention loop whole tiles at computed
addresses, which the tensor memory accelerator can fetch, for every block size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def gather_kernel(
    key_cache,  # [blocks, PAGE, KV_HEADS, DIM]
    value_cache,
    block_table,  # [requests, blocks], rows `table_stride` apart
    requests,  # [prompts, 6], see plan.Prompts
    keys_out,  # [KV_HEADS, total, DIM]
    values_out,
    total,
    table_stride,
    PAGE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    TILE_KEYS: tl.constexpr,  # to which the keys of a prompt are padded
    BLOCK: tl.constexpr,  # keys of one program; divides TILE_KEYS
    PDL: tl.constexpr,
):
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
        source = ((page * PAGE + position % PAGE) * KV_HEADS + head)[:, None] * DIM + dim
        target = (head * total + place + at)[:, None] * DIM + dim
        # zeros behind the last key: the loop multiplies them by 0, and 0 * NaN would be NaN
        tl.store(keys_out + target, tl.load(key_cache + source, mask=real[:, None], other=0.0))
        tl.store(values_out + target, tl.load(value_cache + source, mask=real[:, None], other=0.0))
