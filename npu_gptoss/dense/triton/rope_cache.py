"""RoPE of queries and keys, and the write of keys and values to the paged cache, from the packed projections."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.dense.triton.device import turned
from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def rope_cache_kernel(
    packed,  # [tokens, HEADS + 2 * KV_HEADS, DIM]
    cos_sin,  # [positions, DIM]
    positions,  # [tokens] int64
    slots,  # [>= real tokens]; negative: not written
    query,  # [tokens, HEADS, DIM]
    key_cache,  # [slots, KV_HEADS, DIM]
    value_cache,
    real_tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    GROUP: tl.constexpr,  # heads computed together; divides HEADS and KV_HEADS
    GROUPS: tl.constexpr,  # of a program
    PDL: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, GROUP)[:, None] * DIM + tl.arange(0, HALF)[None, :]
    place = tl.load(positions + token) * DIM + tl.arange(0, HALF)
    cos = tl.load(cos_sin + place)[None, :]
    sin = tl.load(cos_sin + place + HALF)[None, :]
    slot = tl.load(slots + token, mask=token < real_tokens, other=-1).to(tl.int64)
    for group in tl.static_range(GROUPS):
        head = (tl.program_id(1) * GROUPS + group) * GROUP
        source = packed + (token * ALL + head) * DIM + within
        first = tl.load(source)
        second = tl.load(source + HALF)
        if head < HEADS + KV_HEADS:
            first, second = turned(first, second, cos, sin, packed.dtype.element_ty)
        if head < HEADS:
            out = query + (token * HEADS + head) * DIM + within
            tl.store(out, first)
            tl.store(out + HALF, second)
        elif slot >= 0:
            if head < HEADS + KV_HEADS:
                out = key_cache + (slot * KV_HEADS + head - HEADS) * DIM + within
            else:
                out = value_cache + (slot * KV_HEADS + head - HEADS - KV_HEADS) * DIM + within
            tl.store(out, first)
            tl.store(out + HALF, second)
