"""RoPE of packed queries and keys, and the write to the cache: the definition, plain torch, and Ascend's one launch.

Without it a layer on Ascend takes five launches more: three copies that part queries, keys and values, RoPE, the write.
"""

from __future__ import annotations

import torch

from npu_gptoss.dense.operations import FLOATS, ROTATE_WRITE
from npu_gptoss.dense.small_ops import apply_rotary
from npu_gptoss.kernels import ANY, TRITON_ASCEND, Priority, Range, accepts, register_kernel

MOST_HEADS = 96  # of queries, keys and values: gpt-oss has 80


@register_kernel(
    ROTATE_WRITE,
    solution="reference",
    signatures=(accepts(qkv=FLOATS, kv=FLOATS),),
    traits={"head_dim": ANY},
    priority=Priority.REFERENCE,
)
def rotate_write_reference(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """The definition, one row at a time in fp32. query [tokens, heads, head_dim] is written."""
    (kv_heads, dim), heads = key_cache.shape[2:], query.shape[1]
    for row, packed in enumerate(qkv.float().unflatten(-1, (-1, dim))):
        cos, sin = cos_sin[positions[row]].float().chunk(2)
        first, second = packed[: heads + kv_heads].chunk(2, -1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        query[row] = turned[:heads].to(query.dtype)
        if (slot := int(slot_mapping[row])) >= 0:
            key_cache.flatten(0, 1)[slot] = turned[heads:].to(key_cache.dtype)
            value_cache.flatten(0, 1)[slot] = packed[heads + kv_heads :].to(value_cache.dtype)


@register_kernel(
    ROTATE_WRITE,
    solution="small_ops",
    signatures=(accepts(qkv=FLOATS, kv=FLOATS),),
    traits={"head_dim": ANY},
    priority=Priority.PORTABLE,
)
def rotate_write_small_ops(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    query: torch.Tensor,
) -> None:
    """Plain torch ops; the host waits for the slots."""
    tokens, kv_heads = len(qkv), key_cache.shape[2]
    cos, sin = cos_sin[positions[:tokens]].float().chunk(2, -1)
    parts = (query.shape[1], kv_heads, kv_heads)
    turned, key, value = qkv.unflatten(-1, (-1, key_cache.shape[3])).split(parts, 1)
    query.copy_(apply_rotary(turned, cos, sin))
    slots = slot_mapping[:tokens]
    for new, cache in ((apply_rotary(key, cos, sin), key_cache), (value, value_cache)):
        cache.view(-1, *cache.shape[2:])[slots[slots >= 0]] = new[slots >= 0].to(cache.dtype)


register_kernel(
    ROTATE_WRITE,
    solution="triton_ascend",
    capability=TRITON_ASCEND,
    signatures=(accepts(qkv="bfloat16", kv="bfloat16"), accepts(qkv="float32", kv="float32")),
    traits={"head_dim": frozenset({64, 128}), "heads": Range(most=MOST_HEADS)},
    priority=Priority.SPECIALISED,
    function="npu_gptoss.dense.triton_ascend:rotate_write",
    summary="One launch: products in float32, rounded once.",
)
