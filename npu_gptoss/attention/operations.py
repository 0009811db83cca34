"""Roles and traits of the attention family's calls, which every kernel must declare."""

from __future__ import annotations

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import define_operation

# float16 is missing on purpose: the model was trained in bfloat16 and the Ascend sink kernel takes nothing else.
KV_DTYPES = ("float32", "bfloat16")
# A cache of half the size on NVIDIA GPUs, at the user's wish: E4M3 without a scale, 448 in place of what is larger.
FP8 = "float8_e4m3fn"

PAGED = define_operation(
    "attention",
    "paged",
    roles=("query", "kv", "sinks"),
    traits=("head_dim", "block_size", "sliding_window"),
    sizes=("group_size", "max_query_len"),  # query heads of a key head; rows of the request with the most
    summary="causal attention over a paged cache with a sink per head; prefill, chunk and decode rows mixed",
)
WRITE_KV = define_operation(
    "attention",
    "write_kv",
    roles=("key", "kv"),
    traits=("head_dim", "block_size"),
    summary="stores new keys and values in the paged cache",
)


def head_stride(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Elements from one head of a cache to the next, of all its heads, slots and blocks in a row.

    head_dim in a contiguous cache, 2 * head_dim where each key is followed by its value (vLLM 0.33 has one tensor
    [blocks, block_size, kv_heads, 2 * head_dim]). Raises InputError for a cache that is not such a row.
    """
    strides = [_row_stride(cache) for cache in (key_cache, value_cache)]
    if strides[0] is None or strides[0] != strides[1]:
        raise InputError(
            "key_cache and value_cache must be contiguous [blocks, block_size, kv_heads, head_dim], or the halves of "
            "one such tensor's last dimension, so that heads are equally far apart; "
            f"got strides {key_cache.stride()} and {value_cache.stride()}",
            field="key_cache",
        )
    return strides[0]


def _row_stride(cache: torch.Tensor) -> int | None:
    if cache.is_contiguous():
        return cache.shape[-1]
    try:
        row = cache.view(-1, cache.shape[-1])
    except RuntimeError:  # not without a copy
        return None
    return row.stride(0) if row.stride(1) == 1 else None
