"""gpt-oss as a plain, inference-only transformer on the public attention and MoE ops.

The maths is that of transformers' `GptOssForCausalLM` (eager attention), rounding included: RMSNorm in fp32 and then
cast, the residual stream in the model's dtype, router logits as a linear layer in the model's dtype, YaRN tables
computed in fp32 and cast. Requests of one step are packed along the token axis; keys and values live in paged caches
(`npu_gptoss.attention`). Weights are frozen dataclasses; a layer is built as soon as the checkpoint's stream has
delivered its last tensor, so that loading needs about one layer of memory above the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from npu_gptoss.attention import AttentionMetadata, paged_attention, write_kv_cache
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import CheckpointError, iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import apply_rotary, cos_sin_cache
from npu_gptoss.moe import ExpertWeights, PreparedExperts, expert_mlp, prepare_experts, route

DTYPES = (torch.float32, torch.bfloat16)

KVCache = tuple[torch.Tensor, torch.Tensor]  # keys, values: [num_blocks, block_size, kv_heads, head_dim] each

# The official names of a layer's tensors, in the BF16 layout, without their prefix `model.layers.N.`
LAYER_TENSORS = frozenset(
    {"input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.sinks"}
    | {f"self_attn.{projection}_proj.{kind}" for projection in "qkvo" for kind in ("weight", "bias")}
    | {f"mlp.router.{kind}" for kind in ("weight", "bias")}
    | {f"mlp.experts.{name}" for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")}
)
SHARED_TENSORS = frozenset({"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})


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


def check_dtype(dtype: torch.dtype) -> None:
    """Refuses what gpt-oss cannot be computed in."""
    if dtype == torch.float16:
        raise InputError(
            "float16 cannot hold gpt-oss's activations (they overflow beyond 65504): use bfloat16, or float32 on a CPU"
        )
    if dtype not in DTYPES:
        raise InputError(f"gpt-oss runs in {' or '.join(map(_name, DTYPES))}, got {_name(dtype)}")


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """hidden [tokens, hidden], weight [hidden] float32 -> [tokens, hidden] in hidden's dtype; computed in fp32."""
    wide = hidden.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (weight * wide).to(hidden.dtype)


class GptOss:
    """The weights on one device and the forward pass over them."""

    def __init__(
        self,
        config: GptOssConfig,
        *,
        embedding: torch.Tensor,
        layers: Sequence[Layer],
        norm: torch.Tensor,
        lm_head: torch.Tensor,
    ) -> None:
        """embedding, lm_head [vocab, hidden]; norm [hidden] float32."""
        self.config = config
        self.embedding = embedding
        self.layers = tuple(layers)
        self.norm = norm
        self.lm_head = lm_head
        self.cos_sin = cos_sin_cache(config, config.max_position_embeddings, embedding.dtype, embedding.device)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @classmethod
    def load(
        cls,
        directory: str | Path,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.bfloat16,
        *,
        progress: bool = True,
    ) -> GptOss:
        """Reads a checkpoint in the BF16 or the MXFP4 layout. Every parameter must be filled exactly once."""
        check_dtype(dtype)
        config = GptOssConfig.from_directory(Path(directory))
        return cls.from_tensors(
            config, iterate_tensors(directory, config, dtype=dtype, progress=progress), device, dtype
        )

    @classmethod
    @torch.no_grad()
    def from_tensors(
        cls,
        config: GptOssConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> GptOss:
        """Builds the model from a stream of (official name, tensor) in the BF16 layout, in any order."""
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
                layers[index] = _build_layer(config, index, pending.pop(index))
        missing = sorted(SHARED_TENSORS - shared.keys())
        for index in (index for index, layer in enumerate(layers) if layer is None):
            missing += [
                f"model.layers.{index}.{suffix}" for suffix in sorted(LAYER_TENSORS - pending.get(index, {}).keys())
            ]
        if missing:
            raise CheckpointError(f"the checkpoint did not fill {len(missing)} parameters: {', '.join(missing[:5])} …")
        return cls(
            config,
            embedding=shared["model.embed_tokens.weight"],
            layers=[layer for layer in layers if layer is not None],
            norm=shared["model.norm.weight"].float(),
            lm_head=shared["lm_head.weight"],
        )

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """One step over the packed tokens of all requests: writes their keys and values, returns normed hidden states.

        input_ids, positions [rows] int64 on the model's device, rows >= metadata.num_tokens (the rest is padding and
        influences nothing); kv_caches one pair a layer. Returns [rows, hidden] in the model's dtype.
        """
        hidden = F.embedding(input_ids, self.embedding)
        cos, sin = self.cos_sin[positions].chunk(2, dim=-1)
        for layer, (key_cache, value_cache) in zip(self.layers, kv_caches, strict=True):
            hidden = hidden + self._attend(layer.attention, hidden, cos, sin, key_cache, value_cache, metadata)
            hidden = hidden + self._mix(layer.moe, hidden)
        return rms_norm(hidden, self.norm, self.config.rms_norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] from `forward` -> [rows, vocab] float32; the product itself is in the model's dtype."""
        return F.linear(hidden, self.lm_head).float()

    def _attend(
        self,
        weights: AttentionWeights,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        heads, kv_heads, head_dim = (
            self.config.num_attention_heads,
            self.config.num_key_value_heads,
            self.config.head_dim,
        )
        normed = rms_norm(hidden, weights.norm, self.config.rms_norm_eps)
        packed = F.linear(normed, weights.qkv_weight, weights.qkv_bias).unflatten(-1, (-1, head_dim))
        query, key, value = packed.split((heads, kv_heads, kv_heads), dim=1)
        query, key = apply_rotary(query, cos, sin), apply_rotary(key, cos, sin)
        write_kv_cache(key, value, key_cache, value_cache, metadata)
        attended = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            weights.sinks,
            scale=head_dim**-0.5,
            sliding_window=weights.window,
        )
        return F.linear(attended.flatten(1), weights.output_weight, weights.output_bias)

    def _mix(self, weights: MoEWeights, hidden: torch.Tensor) -> torch.Tensor:
        normed = rms_norm(hidden, weights.norm, self.config.rms_norm_eps)
        router_logits = F.linear(normed, weights.router_weight, weights.router_bias)
        topk_weights, topk_ids = route(router_logits, self.config.num_experts_per_tok)
        return expert_mlp(normed, weights.experts, topk_weights, topk_ids)


def _build_layer(config: GptOssConfig, index: int, parts: dict[str, torch.Tensor]) -> Layer:
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
