"""The weights of gpt-oss as the forward pass reads them: plain data, one layer after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass

import torch

from npu_gptoss.moe import PreparedExperts


@dataclass(frozen=True)
class AttentionWeights:
    """One layer's attention. The three input projections are one matrix: rows of q, then k, then v."""

    norm: torch.Tensor  # [hidden] float32
    qkv_weight: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim, hidden]
    qkv_bias: torch.Tensor  # [(heads + 2 * kv_heads) * head_dim]
    output_weight: torch.Tensor  # [hidden, heads * head_dim]
    output_bias: torch.Tensor  # [hidden]
    sinks: torch.Tensor  # [heads]
    window: int | None  # keys that a query sees, itself included; None: all


@dataclass(frozen=True)
class MoEWeights:
    """One layer's router and experts; the experts as their kernel wants them."""

    norm: torch.Tensor  # [hidden] float32
    router_weight: torch.Tensor  # [experts, hidden]
    router_bias: torch.Tensor  # [experts]
    experts: PreparedExperts


@dataclass(frozen=True)
class Layer:
    attention: AttentionWeights
    moe: MoEWeights


# The official tensors of each field of a layer, without `model.layers.N.`; several are rows of one matrix. The experts
# have the names of their own dataclasses.
OFFICIAL = {
    "attention": {
        "norm": ("input_layernorm.weight",),
        "qkv_weight": tuple(f"self_attn.{name}_proj.weight" for name in "qkv"),
        "qkv_bias": tuple(f"self_attn.{name}_proj.bias" for name in "qkv"),
        "output_weight": ("self_attn.o_proj.weight",),
        "output_bias": ("self_attn.o_proj.bias",),
        "sinks": ("self_attn.sinks",),
    },
    "moe": {
        "norm": ("post_attention_layernorm.weight",),
        "router_weight": ("mlp.router.weight",),
        "router_bias": ("mlp.router.bias",),
    },
}


@dataclass(frozen=True)
class ModelWeights:
    """Everything that a checkpoint fills."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden] float32
    lm_head: torch.Tensor  # [vocab, hidden]


def named_tensors(node: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested dataclasses, tuples and mappings, by its path: `weights.layers.0.attention.norm`."""
    if isinstance(node, torch.Tensor):
        yield path, node
        return
    if is_dataclass(node):
        parts = [(field.name, getattr(node, field.name)) for field in fields(node)]
    else:
        values = node.values() if isinstance(node, Mapping) else node if isinstance(node, tuple) else ()
        parts = [(str(index), value) for index, value in enumerate(values)]
    for name, part in parts:
        yield from named_tensors(part, f"{path}.{name}")
