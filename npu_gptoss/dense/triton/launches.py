"""Grids, block shapes and output tensors of the kernels of this folder.

Block shapes were measured on an H200 at gpt-oss's sizes, cold caches (docs/benchmarks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from npu_gptoss.attention.operations import head_stride
from npu_gptoss.dense.shortlist import INPUTS, TOKENS, Shortlist
from npu_gptoss.dense.small_ops import route_live
from npu_gptoss.dense.triton.device import halves
from npu_gptoss.dense.triton.gemv import linear_kernel, qkv_kernel
from npu_gptoss.dense.triton.routing import router_kernel
from npu_gptoss.dense.triton.rows import add_norm_kernel, final_kernel, partial_kernel, rope_cache_kernel
from npu_gptoss.dense.triton.shortlist import bounds_kernel, exact_kernel, split_kernel
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_launch import arrivals, launch, processors
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
SHORTLIST_STAGES, SHORTLIST_PART = 4, 4096  # tiles under way; tokens whose products are one program's


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


@functools.cache
def blocks(inputs: int) -> dict[str, int]:
    """The two tiles of a row of inputs, as constants of a kernel."""
    block_a, block_b = halves(inputs)
    return {"BLOCK_A": block_a, "BLOCK_B": block_b}


def heads_of(packed: int, key_cache: torch.Tensor, value_cache: torch.Tensor) -> dict[str, int]:
    """The constants of a kernel that writes to the cache. packed: rows of q, k and v together."""
    kv_heads, head_dim = key_cache.shape[2:]
    heads = packed // head_dim - 2 * kv_heads
    return {"HEADS": heads, "KV_HEADS": kv_heads, "DIM": head_dim, "STRIDE": head_stride(key_cache, value_cache)}


def routing_of(tokens: int, top_k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for weights float32 and ids int32, [tokens, top_k] each."""
    return tuple(torch.empty(tokens, top_k, dtype=dtype, device=device) for dtype in (torch.float32, torch.int32))


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
    stream = _stream(residual, delta)
    heads = heads_of(weight.shape[0], key_cache, value_cache)
    query = torch.empty(tokens, heads["HEADS"], heads["DIM"], dtype=weight.dtype, device=residual.device)
    pairs = min(QKV_PAIRS, heads["DIM"] // 2)
    groups = weight.shape[0] // (2 * pairs)
    weights = (norm_weight, _rows(weight), bias)
    step = (cos_sin, positions, metadata.slot_mapping, query, key_cache, value_cache, metadata.num_tokens)
    launch(
        qkv_kernel,
        (min(groups, QKV_PROGRAMS * processors(residual.device)), tokens),
        (*stream, *weights, *step, eps),
        warps=QKV_WARPS,
        HIDDEN=hidden,
        PAIRS=pairs,
        HAS_DELTA=delta is not None,
        **heads,
        **blocks(hidden),
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
    groups = triton.cdiv(outputs, LINEAR_ROWS)
    at_once = groups if outputs >= WIDE else LINEAR_PROGRAMS * processors(x.device)
    added = (x if bias is None else bias, x if residual is None else residual.contiguous())
    launch(
        linear_kernel,
        (min(groups, at_once), tokens),
        (x, _rows(weight), *added, out, outputs),
        warps=LINEAR_WARPS,
        IN=weight.shape[1],
        ROWS=LINEAR_ROWS,
        AGAIN=at_once < groups,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        **blocks(weight.shape[1]),
    )
    return out


def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor, eps: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `dense.add_norm`."""
    tokens, hidden = residual.shape
    stream = _stream(residual, delta)
    out = torch.empty_like(stream[0], dtype=dtype)
    if tokens:
        arguments, constants = (*stream, norm_weight, out, eps), {"HIDDEN": hidden, **blocks(hidden)}
        launch(add_norm_kernel, (tokens,), arguments, warps=4, HAS_DELTA=delta is not None, **constants)
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
    constants = heads_of(packed.shape[1], key_cache, value_cache)
    heads, kv_heads = constants["HEADS"], constants["KV_HEADS"]
    query = torch.empty(tokens, heads, constants["DIM"], dtype=packed.dtype, device=packed.device)
    if tokens == 0:
        return query
    group = next(g for g in (8, 4, 2, 1) if heads % g == 0 and kv_heads % g == 0)
    parts = (heads + 2 * kv_heads) // group
    groups = parts if tokens > FEW_ROWS else 1  # a decode batch is spread over the chip, a prompt fills it anyway
    step = (cos_sin, positions, metadata.slot_mapping, query, key_cache, value_cache, metadata.num_tokens)
    grid = (tokens, parts // groups)
    launch(rope_cache_kernel, grid, (packed.contiguous(), *step), warps=2, GROUP=group, GROUPS=groups, **constants)
    return query


def after_norm(work: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Makes a kernel of an operation that begins with `add_norm`, of the work on the normed rows behind it."""

    @functools.wraps(work)
    def kernel(
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        **rest: Any,
    ) -> tuple[torch.Tensor, ...]:
        hidden, normed = add_norm(residual, delta, norm_weight, eps, weight.dtype)
        return hidden, *work(normed, weight, **rest)

    return kernel


@after_norm
def qkv(normed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **rest: Any) -> tuple[torch.Tensor]:
    """The kernel of `dense.qkv`, by cuBLAS. rest: of `rope_cache`."""
    return (rope_cache(F.linear(normed, weight, bias), **rest),)


def logits_gemv(normed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel of `dense.logits`."""
    output_gemv(normed, weight, None, None, out)


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
    routing = routing_of(tokens, top_k, residual.device)
    if tokens == 0:
        return stream[-1], normed, *routing
    share = ROUTER_SHARE if tokens == 1 else ROUTER_SHARE_FEW
    share = next(s for s in (share, 4, 2, 1) if experts % s == 0)
    if share == experts and triton.next_power_of_2(experts) != experts:
        share = 1
    logits = torch.empty(tokens, experts, dtype=torch.float32, device=residual.device)
    read = (norm_weight, weight, bias, routing[1] if live is None else live)
    launch(
        router_kernel,
        (experts // share, tokens),
        (*stream, *read, normed, *routing, logits, arrivals(tokens, residual.device), eps),
        warps=4,
        HIDDEN=hidden,
        EXPERTS=experts,
        SHARE=share,
        TOP_K=top_k,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_K=triton.next_power_of_2(top_k),
        HAS_DELTA=delta is not None,
        HAS_LIVE=live is not None,
        **blocks(hidden),
    )
    return stream[-1], normed, *routing


@after_norm
def router_norm(
    normed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **rest: Any
) -> tuple[torch.Tensor, ...]:
    """The kernel of `dense.router`, by cuBLAS and `moe.route`. rest: of `route_live`."""
    return normed, *route_live(F.linear(normed, weight, bias), **rest)


def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel of `dense.greedy`."""
    logits = logits.contiguous()
    rows, vocab = logits.shape
    block = GREEDY_BLOCK if rows < 8 else GREEDY_BLOCK_MANY
    parts = triton.cdiv(vocab, block)
    values = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if rows:
        warps, found = 4 if rows < 8 else 8, (values, ids)
        launch(partial_kernel, (parts, rows), (logits, *found, parts), warps=warps, VOCAB=vocab, BLOCK=block)
        block = triton.next_power_of_2(parts)
        launch(final_kernel, (rows,), (*found, out, parts, out.stride(0)), warps=1, VOCAB=vocab, BLOCK=block)


def token(normed: torch.Tensor, weight: torch.Tensor, shortlist: Shortlist, noise: torch.Tensor | None) -> torch.Tensor:
    """The kernel of `dense.token`."""
    tokens, hidden = normed.shape
    vocab, padded, device = len(weight), shortlist.rows.shape[1], normed.device
    out = torch.empty(tokens, dtype=torch.int64, device=device)
    if not tokens:
        return out
    normed, block_t = normed.contiguous(), max(16, triton.next_power_of_2(tokens))
    blocks, parts = triton.cdiv(vocab, TOKENS), triton.cdiv(vocab, SHORTLIST_PART)
    floats = functools.partial(torch.empty, dtype=torch.float32, device=device)
    halves, norms = torch.empty(2 * block_t, padded, dtype=torch.int8, device=device), floats(tokens, 4)
    upper, lower, values = floats(tokens, vocab), floats(tokens, blocks), floats(tokens, parts)
    ids = torch.empty(tokens, parts, dtype=torch.int32, device=device)
    sizes = {"PADDED": padded, "BLOCK_T": block_t}
    block = triton.next_power_of_2(padded)
    launch(split_kernel, (tokens,), (normed, halves, norms), warps=4, HIDDEN=hidden, BLOCK=block, **sizes)
    drawn = upper if noise is None else noise.contiguous()  # not touched where there is none
    read = (shortlist.rows, shortlist.bounds, halves, norms, drawn)
    tiles = {"BLOCK_V": TOKENS, "BLOCK_K": INPUTS, "STAGES": SHORTLIST_STAGES, **sizes}
    both = {"VOCAB": vocab, "HAS_NOISE": noise is not None}
    launch(bounds_kernel, (blocks,), (*read, upper, lower, tokens), warps=4, **tiles, **both)
    launch(
        exact_kernel,
        (parts, tokens),
        (normed, _rows(weight), drawn, upper, lower, values, ids, blocks),
        warps=8,
        HIDDEN=hidden,
        BLOCKS=triton.next_power_of_2(blocks),
        PART=SHORTLIST_PART,
        BLOCK=block,
        **both,
    )
    block = triton.next_power_of_2(parts)
    launch(final_kernel, (tokens,), (values, ids, out, parts, 1), warps=1, VOCAB=vocab, BLOCK=block)
    return out
