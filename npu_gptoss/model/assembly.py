"""From a checkpoint's complete stream of tensors to the model's weights.

A layer is built as soon as its last tensor has come, so that loading needs about one layer of memory above the result.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

import torch

from npu_gptoss.attention.padding import with_slack
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.layout import layer_tensors, split_layer
from npu_gptoss.model.weights import OFFICIAL, AttentionWeights, Layer, ModelWeights, MoEWeights
from npu_gptoss.moe import AnyExperts, ExpertWeights, Mxfp4Experts, keeps_format, prepare_experts, quantize_fp8

# What `weights` may be: the experts' format on the device. auto: the checkpoint's where a kernel computes with it.
AUTO, FLOATS, MXFP4, FP8 = WEIGHTS = ("auto", "bf16", "mxfp4", "fp8")


def expert_format(config: GptOssConfig, weights: str, dtype: torch.dtype) -> str:
    """The format that the experts will have on the device: FLOATS, MXFP4 or FP8.

    weights: one of WEIGHTS; bf16 stands for floats in `dtype`, the dtype of the activations. Raises InputError.
    """
    if weights not in WEIGHTS:
        raise InputError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}", field="weights")
    packed = config.quantization == "mxfp4"
    if weights == MXFP4 and not packed:
        raise InputError(
            "weights=mxfp4 needs a checkpoint in MXFP4, got one in floats, which MXFP4 cannot hold without loss: "
            "take the official checkpoint, or weights=bf16 or fp8",
            field="weights",
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
    """Builds the weights from a complete stream of (official name, tensor), in any order (`layout.accounted`).

    The experts stay in the layout in which the stream has them, BF16 or MXFP4, and go to their kernel so.
    expert_map: where the stream holds one rank's experts only, their places among all (`ExpertWeights`).
    fp8: quantizes the experts.
    """
    shared: dict[str, torch.Tensor] = {}
    pending: dict[int, dict[str, torch.Tensor]] = {}
    layers: dict[int, Layer] = {}
    complete = [layer_tensors(config, packed).keys() for packed in (False, True)]
    for name, tensor in tensors:
        index, suffix = split_layer(name)
        parts = shared if index is None else pending.setdefault(index, {})
        parts[suffix] = tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        del tensor  # or it would stay in memory while the next one is read
        if index is not None and parts.keys() in complete:
            layers[index] = _build_layer(config, index, pending.pop(index), expert_map, fp8)
    return ModelWeights(
        embedding=shared["model.embed_tokens.weight"],
        layers=tuple(layers[index] for index in range(config.num_hidden_layers)),
        norm=shared["model.norm.weight"].float(),
        lm_head=shared["lm_head.weight"],
    )


def _build_layer(
    config: GptOssConfig, index: int, parts: dict[str, torch.Tensor], expert_map: torch.Tensor | None, fp8: bool
) -> Layer:
    """Consumes all of one layer's tensors (`layout.layer_tensors`)."""

    def taken(part: str) -> dict[str, torch.Tensor]:
        pieces = {field: [parts.pop(name) for name in names] for field, names in OFFICIAL[part].items()}
        whole = {field: given[0] if len(given) == 1 else torch.cat(given) for field, given in pieces.items()}
        return whole | {"norm": whole["norm"].float()}

    attention = taken("attention")
    attention["sinks"] = with_slack(attention["sinks"])
    experts = _take_experts(parts, expert_map)
    if fp8:
        experts = quantize_fp8(experts)
    moe = MoEWeights(
        **taken("moe"),
        experts=prepare_experts(
            experts, activation="swigluoai", swiglu_limit=config.swiglu_limit, top_k=config.num_experts_per_tok
        ),
    )
    return Layer(AttentionWeights(**attention, window=config.window(index)), moe)


def _take_experts(parts: dict[str, torch.Tensor], expert_map: torch.Tensor | None) -> AnyExperts:
    """A layer's experts in the layout in which they came."""
    kind = ExpertWeights if "mlp.experts.gate_up_proj" in parts else Mxfp4Experts
    names = [field.name for field in fields(kind) if field.name != "expert_map"]
    return kind(**{name: parts.pop(f"mlp.experts.{name}") for name in names}, expert_map=expert_map)
