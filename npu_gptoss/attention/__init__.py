"""Paged attention with a learnable sink per head and an optional sliding window: the public ops.

`reference.py` defines them; the other modules are solutions. A new solution is one file that registers kernels for the
operations of `operations.py`, and one import below.
"""

from __future__ import annotations

import torch

from npu_gptoss.attention import ascend, reference, small_ops, triton  # noqa: F401  (registers their kernels)
from npu_gptoss.attention.metadata import AttentionMetadata, DecodeMetadata, StepMetadata
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.attention.padding import unpad, zero_tail
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound, Described, bind, chosen, expect, signature

__all__ = ["AttentionMetadata", "DecodeMetadata", "LayerKernels", "StepMetadata", "paged_attention", "write_kv_cache"]


def paged_call(
    max_query_len: int, query: torch.Tensor, key_cache: torch.Tensor, sinks: torch.Tensor, sliding_window: int | None
) -> Described:
    """Describes a call of attention.paged by dtypes and shapes of its tensors."""
    return signature(query=query.dtype, kv=key_cache.dtype, sinks=sinks.dtype), {
        "head_dim": query.shape[2],
        "block_size": key_cache.shape[1],
        "sliding_window": sliding_window is not None,
        "group_size": query.shape[1] // key_cache.shape[2],
        "max_query_len": max_query_len,
    }


def write_call(key: torch.Tensor, key_cache: torch.Tensor) -> Described:
    """Describes a call of attention.write_kv."""
    traits = {"head_dim": key.shape[2], "block_size": key_cache.shape[1]}
    return signature(key=key.dtype, kv=key_cache.dtype), traits


class LayerKernels:
    """The kernels of one layer, chosen when it first sees its cache, and kept: `kernel` of the two functions below."""

    def __init__(self, sliding_window: int | None) -> None:
        self.sliding_window = sliding_window
        self._bound: dict[tuple[object, ...], tuple[Bound, Bound]] = {}

    def of(self, query: torch.Tensor, key_cache: torch.Tensor, sinks: torch.Tensor) -> tuple[Bound, Bound]:
        """Binds the kernels of write and attention. query: [rows, heads, head_dim], the last and dtype as the keys'."""
        met = (query.dtype, key_cache.dtype, key_cache.shape[1])
        found = self._bound.get(met)
        if found is None:
            found = self._bound[met] = (
                bind(WRITE_KV, lambda _: write_call(query, key_cache)),
                bind(PAGED, lambda rows: paged_call(rows, query, key_cache, sinks, self.sliding_window)),
            )
        return found


def _check_caches(key_cache: torch.Tensor, value_cache: torch.Tensor, kv_heads: int, head_dim: int) -> None:
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if cache.dim() != 4 or cache.shape[2] != kv_heads or cache.shape[3] != head_dim:
            expect(name, cache, "blocks", "block_size", kv_heads, head_dim)


def write_kv_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    *,
    kernel: Bound | str | None = None,
) -> None:
    """Stores the step's keys and values at `metadata.slot_mapping`; rows past `metadata.num_tokens` are ignored.

    A negative slot is refused on a CPU and left out by the Triton kernel.

    key, value: [>= tokens, kv_heads, head_dim]. Caches: [blocks, block_size, kv_heads, head_dim], written in place.
    kernel: the layer's (`LayerKernels`), or the name of a kernel or solution, to override the selection.
    """
    tokens = metadata.num_tokens
    key, value = unpad(key, tokens, "key"), unpad(value, tokens, "value")
    _check_caches(key_cache, value_cache, *key.shape[1:])
    if tokens == 0:
        return
    run = chosen(WRITE_KV, kernel, 0, lambda _: write_call(key, key_cache))
    slots = unpad(metadata.slot_mapping, tokens, "slot_mapping")
    run(key=key, value=value, key_cache=key_cache, value_cache=value_cache, slot_mapping=slots)


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    *,
    scale: float,
    sliding_window: int | None = None,
    out: torch.Tensor | None = None,
    kernel: Bound | str | None = None,
) -> torch.Tensor:
    """Causal attention of the step's rows over the cached keys, their own included: see `reference` for the formula.

    query: [>= tokens, heads, head_dim]; rows past `metadata.num_tokens` are padding and may hold anything, even NaN.
    Caches: [blocks, block_size, kv_heads, head_dim] with the step's own keys already written; heads % kv_heads == 0.
    sinks: [heads], the logit that takes part in the softmax without a value.
    scale: factor of the scores, head_dim ** -0.5 for gpt-oss.
    sliding_window: number of keys each query sees, its own included; None sees all.
    out: [rows of query, heads, head_dim], written in place and returned; by default of the query's dtype.
    kernel: the layer's (`LayerKernels`), or the name of a kernel or solution, to override the selection.

    Returns out with zeros in the rows past `metadata.num_tokens`.
    """
    tokens = metadata.num_tokens
    if query.dim() != 3:
        raise InputError(f"query must be [tokens, heads, head_dim], got {list(query.shape)}", field="query")
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2] if key_cache.dim() == 4 else 0
    _check_caches(key_cache, value_cache, kv_heads, head_dim)
    if kv_heads == 0 or heads % kv_heads:
        raise InputError(f"{heads} query heads cannot share {kv_heads} key heads evenly", field="query")
    expect("sinks", sinks, heads)
    if out is None:
        out = torch.empty_like(query)
    else:
        expect("out", out, *query.shape)
    if tokens:
        run = chosen(
            PAGED,
            kernel,
            metadata.max_query_len,
            lambda rows: paged_call(rows, query, key_cache, sinks, sliding_window),
        )
        run(
            query=unpad(query, tokens, "query"),
            key_cache=key_cache,
            value_cache=value_cache,
            metadata=metadata,
            sinks=sinks,
            scale=scale,
            sliding_window=sliding_window,
            out=unpad(out, tokens, "out"),
        )
    return zero_tail(out, tokens)
