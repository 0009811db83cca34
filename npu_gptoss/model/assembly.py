"""From a checkpoint's stream of tensors to the model's weights: every tensor used, every parameter filled once.

A layer is built as soon as its last tensor has come, so that loading needs about one layer of memory above the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import CheckpointError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.weights import AttentionWeights, Layer, ModelWeights, MoEWeights
from npu_gptoss.moe import (
    AnyExperts,
    ExpertWeights,
    Mxfp4Experts,
    keeps_format,
    prepare_experts,
    quantize_fp8,
)

# What `weights` may be: the experts' format on the device. auto: the checkpoint's where a kernel computes with it.
AUTO, FLOATS, MXFP4, FP8 = WEIGHTS = ("auto", "bf16", "mxfp4", "fp8")

# The official names of a layer's tensors, in the BF16 layout, without their prefix `model.layers.N.`
LAYER_TENSORS = frozenset(
    {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks"}
    | {f"self_attn.{projection}_proj.{kind}" for projection in "qkvo" for kind in ("weight", "bias")}
    | {f"mlp.router.{kind}" for kind in ("weight", "bias")}
    | {f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}
)
# The same in the MXFP4 layout
PACKED_LAYER_TENSORS = LAYER_TENSORS - {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"} | {
    f"mlp.experts.{name}_{half}" for name in ("gate_up_proj", "down_proj") for half in ("blocks", "scales")
}
SHARED_TENSORS = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


def expert_format(config: GptOssConfig, weights: str, dtype: torch.dtype) -> str:
    """The format that the experts will have on the device: FLOATS, MXFP4 or FP8.

    weights: one of WEIGHTS; bf16 stands for floats in `dtype`, the dtype of the activations. Raises InputError.
    """
    if weights not in WEIGHTS:
        raise InputError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    packed = config.quantization == "mxfp4"
    if weights == MXFP4 and not packed:
        raise InputError(
            "weights=mxfp4 needs a checkpoint in MXFP4, got one in floats, which MXFP4 cannot hold without loss: "
            "take the official checkpoint, or weights=bf16 or fp8"
        )
    if weights == AUTO:
        return MXFP4 if packed and keeps_format("mxfp4", dtype) else FLOATS
    return weights


@torch.no_grad()
def assemble(
    config: GptOssConfig,
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: str | torch.device,
    dtype: torch.dtype,
    expert_map: torch.Tensor | None = None,
    *,
    fp8: bool = False,
) -> ModelWeights:
    """Builds the weights from a stream of (official name, tensor) in any order.

    The experts stay in the layout in which the stream has them, BF16 or MXFP4, and go to their kernel so.
    expert_map: where the stream holds one rank's experts only, their places among all (`ExpertWeights`).
    fp8: quantizes the experts.
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
            parts, known = pending.setdefault(index, {}), LAYER_TENSORS | PACKED_LAYER_TENSORS
        if suffix not in known:
            raise CheckpointError(f"{name} is no tensor of gpt-oss; nothing would read it")
        if suffix in parts or (index is not None and layers[index] is not None):
            raise CheckpointError(f"{name} came twice; every parameter is filled once")
        parts[suffix] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        del tensor  # or it would stay in memory while the next one is read
        if index is not None and parts.keys() in (LAYER_TENSORS, PACKED_LAYER_TENSORS):
            layers[index] = _build_layer(config, index, pending.pop(index), expert_map, fp8)
    missing = sorted(SHARED_TENSORS - shared.keys())
    for index in (index for index, layer in enumerate(layers) if layer is None):
        found = pending.get(index, {}).keys()
        wanted = PACKED_LAYER_TENSORS if found & (PACKED_LAYER_TENSORS - LAYER_TENSORS) else LAYER_TENSORS
        missing += [f"model.layers.{index}.{suffix}" for suffix in sorted(wanted - found)]
    if missing:
        raise CheckpointError(f"the checkpoint did not fill {len(missing)} parameters: {', '.join(missing[:5])} …")
    return ModelWeights(
        embedding=shared["model.embed_tokens.weight"],
        layers=tuple(layer for layer in layers if layer is not None),
        norm=shared["model.norm.weight"].float(),
        lm_head=shared["lm_head.weight"],
    )


def _build_layer(
    config: GptOssConfig,
    index: int,
    parts: dict[str, torch.Tensor],
    expert_map: torch.Tensor | None,
    fp8: bool,
) -> Layer:
    """Consumes all of one layer's tensors (LAYER_TENSORS or PACKED_LAYER_TENSORS)."""

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
    experts = _take_experts(parts, expert_map)
    if fp8:
        experts = quantize_fp8(experts)
    moe = MoEWeights(
        norm=parts.pop("post_attention_layernorm.weight").float(),
        router_weight=parts.pop("mlp.router.weight"),
        router_bias=parts.pop("mlp.router.bias"),
        experts=prepare_experts(experts, activation="swigluoai", swiglu_limit=config.swiglu_limit),
    )
    if parts:
        raise AssertionError(f"layer {index}: nothing consumed {', '.join(sorted(parts))}")
    return Layer(attention, moe)


def _take_experts(parts: dict[str, torch.Tensor], expert_map: torch.Tensor | None) -> AnyExperts:
    """A layer's experts in the layout in which they came."""
    kind = ExpertWeights if "mlp.experts.gate_up_proj" in parts else Mxfp4Experts
    names = [field.name for field in fields(kind) if field.name != "expert_map"]
    return kind(**{name: parts.pop(f"mlp.experts.{name}") for name in names}, expert_map=expert_map)


def _split_layer(name: str) -> tuple[int | None, str]:
    """`model.layers.3.mlp.router.bias` -> (3, `mlp.router.bias`); a name outside the layers -> (None, name)."""
    prefix = "model.layers."
    if name.startswith(prefix):
        index, _, suffix = name[len(prefix) :].partition(".")
        if index.isdigit():
            return int(index), suffix
    return None, name
