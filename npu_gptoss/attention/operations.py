"""What the calls of the attention family pass, and so what every kernel of it must declare."""

from __future__ import annotations

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import define_operation

# float16 is missing on purpose: the model was trained in bfloat16 and the Ascend sink kernel takes nothing else.
KV_DTYPES = ("float32", "bfloat16")

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


def contiguous(cache: torch.Tensor, name: str = "the cache") -> torch.Tensor:
    """The cache itself, of which a kernel makes one row of slots; raises InputError for one that would be copied."""
    if not cache.is_contiguous():
        raise InputError(
            f"{name} must be contiguous [blocks, block_size, kv_heads, head_dim], got strides {cache.stride()}"
        )
    return cache
