"""Launches of the Gluon kernels, and how large the ring of a projection's program is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from npu_gptoss.dense.triton.launches import after_norm, blocks, heads_of, routing_of
from npu_gptoss.kernels.tiles import tile
from npu_gptoss.kernels.triton_launch import arrivals, launch, launch_options

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


def _tiles(ring: Ring, columns: int) -> dict[str, int]:
    return {"BLOCK_T": columns, "BLOCK_K": ring.inputs, "STAGES": ring.stages}


@after_norm
def qkv(normed: torch.Tensor, weight: torch.Tensor, **rest: Any) -> tuple[torch.Tensor]:
    """The kernel of `dense.qkv`. rest: of `project`."""
    return (project(normed, weight, **rest),)


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


@after_norm
def router(normed: torch.Tensor, weight: torch.Tensor, **rest: Any) -> tuple[torch.Tensor, ...]:
    """The kernel of `dense.router`; ids int32. rest: of `routed`."""
    return normed, *routed(normed, weight, **rest)


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
    from npu_gptoss.kernels.gluon_names import descriptor

    tokens, inputs = normed.shape
    constants = heads_of(weight.shape[0], key_cache, value_cache)
    heads, kv_heads, _ = constants["HEADS"], constants["KV_HEADS"], constants.pop("DIM")
    ring, columns = ring or _ring("qkv", tokens), _columns(tokens)
    query = torch.empty(tokens, heads, HEAD_DIM, dtype=normed.dtype, device=normed.device)
    operands = (descriptor(weight, HEAD_DIM, ring.inputs), descriptor(normed, columns, ring.inputs))
    step = (cos_sin, positions, metadata.slot_mapping, query, key_cache, value_cache, tokens, metadata.num_tokens)
    hopper.qkv_kernel[(heads + 2 * kv_heads, triton.cdiv(tokens, columns))](
        *(*operands, bias, *step),
        STEPS=triton.cdiv(inputs, ring.inputs),
        **constants,
        **_tiles(ring, columns),
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
    from npu_gptoss.kernels.gluon_names import descriptor

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
    operands = (descriptor(weight, 64, ring.inputs), descriptor(x, columns, ring.inputs))
    added = (x if bias is None else bias, x if residual is None else residual.contiguous())
    hopper.linear_kernel[(tiles, token_tiles, ring.splits)](
        *(*operands, *added, out, shares, arrived, tokens, outputs),
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        SPLITS=ring.splits,
        STEPS=triton.cdiv(inputs, ring.inputs * ring.splits),
        **_tiles(ring, columns),
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
    routing = routing_of(tokens, top_k, normed.device)
    parts, groups = experts // router_hopper.SHARE.value, triton.cdiv(tokens, router_hopper.ROWS.value)
    sums = routing[0]  # not touched
    if parts > 1:
        sums = torch.empty(tokens, experts, dtype=torch.float32, device=normed.device)
    read = (normed, weight, bias, routing[1] if live is None else live)
    launch(
        router_hopper.router_kernel,
        (parts, groups),
        (*read, *routing, sums, arrivals(groups, normed.device), tokens),
        warps=ROUTER_WARPS,
        HIDDEN=hidden,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCK_K=triton.next_power_of_2(top_k),
        HAS_LIVE=live is not None,
        **blocks(hidden),
    )
    return routing
