"""Grids, block shapes and output tensors of the kernels of this folder.

Block shapes were measured on an H200 at gpt-oss's sizes, cold caches (docs/benchmarks).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from npu_gptoss.attention.operations import head_stride
from npu_gptoss.dense.small_ops import route_live
from npu_gptoss.dense.triton.device import halves
from npu_gptoss.dense.triton.gemv import linear_kernel, qkv_kernel
from npu_gptoss.dense.triton.routing import router_kernel
from npu_gptoss.dense.triton.rows import add_norm_kernel, final_kernel, partial_kernel, rope_cache_kernel
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_launch import launch_options, processors
from npu_gptoss.moe.operations import FEW_ROWS

if TYPE_CHECKING:
    from npu_gptoss.attention import StepMetadata

# The matrix-vector products: rows of the weight at a time (qkv: pairs of rows), warps, programs on each multiprocessor.
QKV_PAIRS, QKV_WARPS, QKV_PROGRAMS = 2, 4, 3
LINEAR_ROWS, LINEAR_WARPS, LINEAR_PROGRAMS = 4, 4, 2
WIDE = 65536  # outputs from which on there is a program for every few rows: lm_head streams at full speed so
ROUTER_SHARE, ROUTER_SHARE_FEW = 1, 4  # experts of a program: for one row, for more
# Logits of a program: small where one row is to fill the chip, large where many rows do.
GREEDY_BLOCK, GREEDY_BLOCK_MANY = 1024, 8192


def _rows(weight: torch.Tensor) -> torch.Tensor:
    """Side by side in memory, as the kernels read them."""
    if not weight.is_contiguous():
        raise InputError(f"the weight must be contiguous, got strides {weight.stride()}", field="weight")
    return weight


def _stream(residual: torch.Tensor, delta: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the residual, the addend (any tensor where there is none) and memory for the fp32 sum (then the
    residual)."""
    residual = residual.contiguous()
    if delta is None:
        return residual, residual, residual
    return residual, delta.contiguous(), torch.empty_like(residual, dtype=torch.float32)


def qkv_gemv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `dense.qkv`."""
    tokens, hidden = residual.shape
    kv_heads, head_dim = key_cache.shape[2:]
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    stream = _stream(residual, delta)
    query = torch.empty(tokens, heads, head_dim, dtype=weight.dtype, device=residual.device)
    block_a, block_b = halves(hidden)
    pairs = min(QKV_PAIRS, head_dim // 2)
    groups = weight.shape[0] // (2 * pairs)
    qkv_kernel[(min(groups, QKV_PROGRAMS * processors(residual.device)), tokens)](
        *stream,
        norm_weight,
        _rows(weight),
        bias,
        cos_sin,
        positions,
        metadata.slot_mapping,
        query,
        key_cache,
        value_cache,
        metadata.num_tokens,
        eps,
        HIDDEN=hidden,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        STRIDE=head_stride(key_cache, value_cache),
        PAIRS=pairs,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        HAS_DELTA=delta is not None,
        **launch_options(residual, QKV_WARPS),
    )
    return stream[-1], query


def output_gemv(
    attended: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The kernel of `dense.output`."""
    tokens, outputs = len(attended), weight.shape[0]
    x = attended.contiguous()
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype if residual is None else torch.float32, device=x.device)
    block_a, block_b = halves(weight.shape[1])
    groups = triton.cdiv(outputs, LINEAR_ROWS)
    at_once = groups if outputs >= WIDE else LINEAR_PROGRAMS * processors(x.device)
    linear_kernel[(min(groups, at_once), tokens)](
        x,
        _rows(weight),
        x if bias is None else bias,
        x if residual is None else residual.contiguous(),
        out,
        outputs,
        IN=weight.shape[1],
        ROWS=LINEAR_ROWS,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        AGAIN=at_once < groups,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **launch_options(x, LINEAR_WARPS),
    )
    return out


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `dense.add_norm`."""
    tokens, hidden = residual.shape
    stream = _stream(residual, delta)
    out = torch.empty_like(stream[0], dtype=dtype)
    if tokens == 0:
        return stream[-1], out
    block_a, block_b = halves(hidden)
    add_norm_kernel[(tokens,)](
        *stream,
        norm_weight,
        out,
        eps,
        HIDDEN=hidden,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        HAS_DELTA=delta is not None,
        **launch_options(residual, 4),
    )
    return stream[-1], out


def rope_cache(
    packed: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
) -> torch.Tensor:
    """packed [tokens, (heads + 2 * kv_heads) * head_dim] -> turned queries [tokens, heads, head_dim]; k, v stored."""
    tokens = packed.shape[0]
    kv_heads, head_dim = key_cache.shape[2:]
    heads = packed.shape[1] // head_dim - 2 * kv_heads
    query = torch.empty(tokens, heads, head_dim, dtype=packed.dtype, device=packed.device)
    if tokens == 0:
        return query
    group = next(g for g in (8, 4, 2, 1) if heads % g == 0 and kv_heads % g == 0)
    parts = (heads + 2 * kv_heads) // group
    groups = parts if tokens > FEW_ROWS else 1  # a decode batch is spread over the chip, a prompt fills it anyway
    rope_cache_kernel[(tokens, parts // groups)](
        packed.contiguous(),
        cos_sin,
        positions,
        metadata.slot_mapping,
        query,
        key_cache,
        value_cache,
        metadata.num_tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        DIM=head_dim,
        STRIDE=head_stride(key_cache, value_cache),
        GROUP=group,
        GROUPS=groups,
        **launch_options(packed, 2),
    )
    return query


def qkv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `dense.qkv`, by cuBLAS. rest: of `rope_cache`."""
    hidden, normed = add_norm(residual, delta, norm_weight, eps, weight.dtype)
    return hidden, rope_cache(F.linear(normed, weight, bias), **rest)


def logits_gemv(normed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel of `dense.logits`."""
    output_gemv(normed, weight, None, None, out)


@functools.cache
def _zeros(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.int32, device=device)


def arrivals(count: int, device: torch.device) -> torch.Tensor:
    """At least `count` zeroed counters that every launch leaves at zero; kept for good: graphs hold their address."""
    return _zeros(max(1024, triton.next_power_of_2(count)), device)


def router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    live: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `dense.router`; ids int32."""
    tokens, hidden = residual.shape
    experts = weight.shape[0]
    stream = _stream(residual, delta)
    normed = torch.empty_like(stream[0], dtype=weight.dtype)
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=residual.device)
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=residual.device)
    if tokens == 0:
        return stream[-1], normed, topk_weights, topk_ids
    share = ROUTER_SHARE if tokens == 1 else ROUTER_SHARE_FEW
    share = next(s for s in (share, 4, 2, 1) if experts % s == 0)
    if share == experts and triton.next_power_of_2(experts) != experts:
        share = 1
    block_a, block_b = halves(hidden)
    router_kernel[(experts // share, tokens)](
        *stream,
        norm_weight,
        weight,
        bias,
        topk_ids if live is None else live,
        normed,
        topk_weights,
        topk_ids,
        torch.empty(tokens, experts, dtype=torch.float32, device=residual.device),
        arrivals(tokens, residual.device),
        eps,
        HIDDEN=hidden,
        EXPERTS=experts,
        SHARE=share,
        TOP_K=top_k,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        HAS_DELTA=delta is not None,
        HAS_LIVE=live is not None,
        **launch_options(residual, 4),
    )
    return stream[-1], normed, topk_weights, topk_ids


def router_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `dense.router`, by cuBLAS and `moe.route`. rest: of `route_live`."""
    hidden, normed = add_norm(residual, delta, norm_weight, eps, weight.dtype)
    return hidden, normed, *route_live(normed, weight, **rest)


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel of `dense.greedy`."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    block = GREEDY_BLOCK if rows < 8 else GREEDY_BLOCK_MANY
    parts = triton.cdiv(vocab, block)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if rows:
        partial_kernel[(parts, rows)](
            logits, values, ids, parts, VOCAB=vocab, BLOCK=block, **launch_options(logits, 4 if rows < 8 else 8)
        )
        final_kernel[(rows,)](
            values,
            ids,
            out,
            parts,
            out.stride(0),
            VOCAB=vocab,
            BLOCK=triton.next_power_of_2(parts),
            **launch_options(logits, 1),
        )
