"""From a checkpoint's stream of tensors to the model's weights: every tensor used, every parameter filled once.

A layer is built as soon as its last tensor has come, so that loading needs about one layer of memory above the result.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from npu_gptoss.model.checkpoint import CheckpointError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.weights import AttentionWeights, Layer, ModelWeights, MoEWeights
from npu_gptoss.moe import ExpertWeights, prepare_experts

# The official names of a layer's tensors, in the BF16 layout, without their prefix `model.layers.N.`
LAYER_TENSORS = frozenset(
    {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks"}
    | {f"self_attn.{projection}_proj.{kind}" for projection in "qkvo" for kind in ("weight", "bias")}
    | {f"mlp.router.{kind}" for kind in ("weight", "bias")}
    | {f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}
)
SHARED_TENSORS = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


@torch.no_grad()
def assemble(
    config: GptOssConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: str | torch.device,
    dtype: torch.dtype,
    expert_map: torch.Tensor | None = None,
) -> ModelWeights:
    """Builds the weights from a stream of (official name, tensor) in the BF16 layout, in any order.

    expert_map: where the stream holds one rank's experts only, their places among all (`ExpertWeights`).
    Raises CheckpointError for a tensor that nothing reads or that comes twice, and for parameters that none filled.
    """
    shared: dict[str, torch.Tensor] = {}
    pending: dict[int, dict[str, torch.Tensor]] = {}
    layers: list[Layer | None] = [None] * config.num_hidden_layers
    for name, tensor in tensors:
        index, suffix = _split_layer(name)
        if index is None:
            parts, known = shared, SHARED_TENSORS
        elif index >= len(layers):
            raise CheckpointError(f"{name} belongs to layer {index}, but the model has {len(layers)} layers")
        else:
            parts, known = pending.setdefault(index, {}), LAYER_TENSORS
        if suffix not in known:
            raise CheckpointError(f"{name} is no tensor of gpt-oss in the BF16 layout; nothing would read it")
        if suffix in parts or (index is not None and layers[index] is not None):
            raise CheckpointError(f"{name} came twice; every parameter is filled once")
        parts[suffix] = tensor.to(device=device, dtype=dtype)
        if index is not None and parts.keys() == LAYER_TENSORS:
            layers[index] = _build_layer(config, index, pending.pop(index), expert_map)
    missing = sorted(SHARED_TENSORS - shared.keys())
    for index in (index for index, layer in enumerate(layers) if layer is None):
        missing += [
            f"model.layers.{index}.{suffix}" for suffix in sorted(LAYER_TENSORS - pending.get(index, {}).keys())
        ]
    if missing:
        raise CheckpointError(f"the checkpoint did not fill {len(missing)} parameters: {', '.join(missing[:5])} …")
    return ModelWeights(
        embedding=shared["model.embed_tokens.weight"],
        layers=tuple(layer for layer in layers if layer is not None),
        norm=shared["model.norm.weight"].float(),
        lm_head=shared["lm_head.weight"],
    )


def _build_layer(
    config: GptOssConfig, index: int, parts: dict[str, torch.Tensor], expert_map: torch.Tensor | None
) -> Layer:
    """Consumes all of one layer's tensors (LAYER_TENSORS)."""

    def fused(kind: str) -> torch.Tensor:
        return torch.cat([parts.pop(f"self_attn.{projection}_proj.{kind}") for projection in "qkv"])

    attention = AttentionWeights(
        norm=parts.pop("input_layernorm.weight").float(),
        qkv_weight=fused("weight"),
        qkv_bias=fused("bias"),
        output_weight=parts.pop("self_attn.o_proj.weight"),
        output_bias=parts.pop("self_attn.o_proj.bias"),
        sinks=parts.pop("self_attn.sinks"),
        window=config.window(index),
    )
    experts = ExpertWeights(
        gate_up_proj=parts.pop("mlp.experts.gate_up_proj"),
        gate_up_proj_bias=parts.pop("mlp.experts.gate_up_proj_bias"),
        down_proj=parts.pop("mlp.experts.down_proj"),
        down_proj_bias=parts.pop("mlp.experts.down_proj_bias"),
        expert_map=expert_map,
    )
    moe = MoEWeights(
        norm=parts.pop("post_attention_layernorm.weight").float(),
        router_weight=parts.pop("mlp.router.weight"),
        router_bias=parts.pop("mlp.router.bias"),
        experts=prepare_experts(experts, activation="swigluoai", swiglu_limit=config.swiglu_limit),
    )
    if parts:
        raise AssertionError(f"layer {index}: nothing consumed {', '.join(sorted(parts))}")
    return Layer(attention, moe)


def _split_layer(name: str) -> tuple[int | None, str]:
    """`model.layers.3.mlp.router.bias` -> (3, `mlp.router.bias`); a name outside the layers -> (None, name)."""
    prefix = "model.layers."
    if name.startswith(prefix):
        index, _, suffix = name[len(prefix) :].partition(".")
        if index.isdigit():
            return int(index), suffix
    return None, name
