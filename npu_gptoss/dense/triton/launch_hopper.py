"""Launches of the Gluon kernels, and how large the ring of a projection's program is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from npu_gptoss.attention.operations import head_stride
from npu_gptoss.dense.triton.device import halves
from npu_gptoss.dense.triton.launches import add_norm, arrivals
from npu_gptoss.kernels.tiles import tile
from npu_gptoss.kernels.triton_launch import launch_options

if TYPE_CHECKING:
    from npu_gptoss.attention import StepMetadata

HEAD_DIM = 64
ROUTER_WARPS = 16


@dataclass(frozen=True)
class Ring:
    """A program's tiles under way: `stages` of 64 rows by `inputs`. splits: programs that share a tile's inputs.

    The smaller the ring, the sooner a program finds a multiprocessor that the kernel before has left room on.
    """

    inputs: int
    stages: int
    splits: int = 1


TOKENS = (16, 32)  # up to how many a ring of the table counts


def _ring(projection: str, tokens: int) -> Ring:
    return tile(f"dense.{projection}.{next(most for most in TOKENS if tokens <= most)}", Ring)


def _columns(tokens: int) -> int:
    return max(triton.next_power_of_2(tokens), 8)


def qkv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel of `dense.qkv`. rest: of `project`."""
    hidden, normed = add_norm(residual, delta, norm_weight, eps, weight.dtype)
    return hidden, project(normed, weight, **rest)


def output(attended: torch.Tensor, **rest: Any) -> torch.Tensor:
    """The kernel of `dense.output`. rest: of `linear`."""
    return linear(_aligned(attended), **rest)


def logits(normed: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The kernel of `dense.logits`."""
    linear(_aligned(normed), weight, None, None, _ring("logits", len(normed)), out)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """The tensor memory accelerator wants rows that begin at multiples of 16 bytes."""
    unmoved = x.is_contiguous() and x.data_ptr() % 16 == 0
    return x if unmoved else x.clone(memory_format=torch.contiguous_format)


def router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    **rest: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The kernel of `dense.router`; ids int32. rest: of `routed`."""
    hidden, normed = add_norm(residual, delta, norm_weight, eps, weight.dtype)
    return hidden, normed, *routed(normed, weight, **rest)


def project(
    normed: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    ring: Ring | None = None,
) -> torch.Tensor:
    """normed [tokens, inputs] -> turned queries [tokens, heads, 64]; keys and values stored.

    ring: to measure others than the chosen one.
    """
    from npu_gptoss.dense.triton import hopper

    tokens, inputs = normed.shape
    kv_heads = key_cache.shape[2]
    heads = weight.shape[0] // HEAD_DIM - 2 * kv_heads
    ring, columns = ring or _ring("qkv", tokens), _columns(tokens)
    query = torch.empty(tokens, heads, HEAD_DIM, dtype=normed.dtype, device=normed.device)
    hopper.qkv_kernel[(heads + 2 * kv_heads, triton.cdiv(tokens, columns))](
        hopper.descriptor(weight, HEAD_DIM, ring.inputs),
        hopper.descriptor(normed, columns, ring.inputs),
        bias,
        cos_sin,
        positions,
        metadata.slot_mapping,
        query,
        key_cache,
        value_cache,
        tokens,
        metadata.num_tokens,
        HEADS=heads,
        KV_HEADS=kv_heads,
        STRIDE=head_stride(key_cache, value_cache),
        BLOCK_T=columns,
        BLOCK_K=ring.inputs,
        STEPS=triton.cdiv(inputs, ring.inputs),
        STAGES=ring.stages,
        **launch_options(normed, 4),
    )
    return query


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    ring: Ring | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens, in] @ weight [out, in].T + bias + residual, into `out` where given.

    ring: others than the one of `dense.output`.
    """
    from npu_gptoss.dense.triton import hopper

    tokens, inputs = x.shape
    outputs = weight.shape[0]
    ring, columns = ring or _ring("output", tokens), _columns(tokens)
    tiles, token_tiles = triton.cdiv(outputs, 64), triton.cdiv(tokens, columns)
    if out is None:
        out = torch.empty(tokens, outputs, dtype=x.dtype if residual is None else torch.float32, device=x.device)
    shares = arrived = x  # not touched
    if ring.splits > 1:
        shares = torch.empty(token_tiles * tiles * ring.splits * columns * 64, dtype=torch.float32, device=x.device)
        arrived = arrivals(token_tiles * tiles, x.device)
    hopper.linear_kernel[(tiles, token_tiles, ring.splits)](
        hopper.descriptor(weight, 64, ring.inputs),
        hopper.descriptor(x, columns, ring.inputs),
        x if bias is None else bias,
        x if residual is None else residual.contiguous(),
        out,
        shares,
        arrived,
        tokens,
        outputs,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLITS=ring.splits,
        BLOCK_T=columns,
        BLOCK_K=ring.inputs,
        STEPS=triton.cdiv(inputs, ring.inputs * ring.splits),
        STAGES=ring.stages,
        **launch_options(x, 4),
    )
    return out


def routed(
    normed: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, top_k: int, live: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """normed [tokens, inputs] -> weights [tokens, top_k] float32 and ids int32, as `dense.router`."""
    from npu_gptoss.dense.triton import router_hopper

    tokens, hidden = normed.shape
    experts = weight.shape[0]
    topk_weights = torch.empty(tokens, top_k, dtype=torch.float32, device=normed.device)
    topk_ids = torch.empty(tokens, top_k, dtype=torch.int32, device=normed.device)
    parts, groups = experts // router_hopper.SHARE.value, triton.cdiv(tokens, router_hopper.ROWS.value)
    sums = topk_weights  # not touched
    if parts > 1:
        sums = torch.empty(tokens, experts, dtype=torch.float32, device=normed.device)
    block_a, block_b = halves(hidden)
    router_hopper.router_kernel[(parts, groups)](
        normed,
        weight,
        bias,
        topk_ids if live is None else live,
        topk_weights,
        topk_ids,
        sums,
        arrivals(groups, normed.device),
        tokens,
        HIDDEN=hidden,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCK_A=block_a,
        BLOCK_B=block_b,
        BLOCK_K=triton.next_power_of_2(top_k),
        HAS_LIVE=live is not None,
        **launch_options(normed, ROUTER_WARPS),
    )
    return topk_weights, topk_ids
