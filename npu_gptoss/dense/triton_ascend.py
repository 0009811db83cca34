"""RoPE of packed queries and keys, and the write to the cache, on a 910B's vector cores, for Triton-Ascend.

Loading this module imports triton. `npu-gptoss verify --compile` says what was seen of it, and docs/verify.md what not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_ascend import vector_cores


@triton.jit(do_not_specialize=["tokens"])  # or each number of tokens of another kind would compile it again
def rotate_write_kernel(
    qkv,  # [tokens, (HEADS + 2 * KV_HEADS) * DIM]
    cos_sin,  # [positions, DIM]
    positions,  # [>= tokens] int64
    key_cache,  # [slots, KV_HEADS * DIM]
    value_cache,
    slots,  # [>= tokens] int32 or int64, negative: not written
    query,  # [tokens, HEADS * DIM]
    tokens,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, HALF)
    of_query = tl.arange(0, HEADS)[:, None] * DIM + column[None, :]
    of_key = tl.arange(0, KV_HEADS)[:, None] * DIM + column[None, :]
    of_value = tl.arange(0, KV_HEADS * DIM)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        at = tl.cast(token, tl.int64)
        angle = cos_sin + tl.load(positions + token).to(tl.int64) * DIM + column
        cos = tl.load(angle).to(tl.float32)[None, :]
        sin = tl.load(angle + HALF).to(tl.float32)[None, :]
        source = qkv + at * ((HEADS + 2 * KV_HEADS) * DIM)
        target = query + at * (HEADS * DIM)
        first = tl.load(source + of_query).to(tl.float32)
        second = tl.load(source + HALF + of_query).to(tl.float32)
        tl.store(target + of_query, (first * cos - second * sin).to(query.dtype.element_ty))
        tl.store(target + HALF + of_query, (second * cos + first * sin).to(query.dtype.element_ty))
        slot = tl.load(slots + token).to(tl.int64)
        if slot >= 0:
            keys = source + HEADS * DIM
            place = slot * (KV_HEADS * DIM)
            upper = tl.load(keys + of_key).to(tl.float32)
            lower = tl.load(keys + HALF + of_key).to(tl.float32)
            tl.store(key_cache + place + of_key, (upper * cos - lower * sin).to(key_cache.dtype.element_ty))
            tl.store(key_cache + place + HALF + of_key, (lower * cos + upper * sin).to(key_cache.dtype.element_ty))
            tl.store(value_cache + place + of_value, tl.load(keys + KV_HEADS * DIM + of_value))


def rotate_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Does as `dense.reference`. Raises InputError for a tensor with gaps: the kernel gets addresses only."""
    given = {"qkv": qkv, "cos_sin": cos_sin, "key_cache": key_cache, "value_cache": value_cache}
    if apart := [name for name, tensor in given.items() if not tensor.is_contiguous()]:
        raise InputError(f"{apart[0]} must be contiguous, got strides {given[apart[0]].stride()}", field=apart[0])
    tokens, heads, dim = query.shape
    rotate_write_kernel[(min(tokens, vector_cores(query.device)),)](
        qkv,
        cos_sin,
        positions,
        key_cache,
        value_cache,
        slot_mapping,
        query,
        tokens,
        HEADS=heads,
        KV_HEADS=key_cache.shape[2],
        DIM=dim,
    )
