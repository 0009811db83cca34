"""The weights of gpt-oss as the forward pass reads them: plain data, one layer after the other."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class ModelWeights:
    """Everything that a checkpoint fills."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    norm: torch.Tensor  # [hidden] float32
    lm_head: torch.Tensor  # [vocab, hidden]
