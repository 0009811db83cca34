"""gpt-oss as a plain, inference-only transformer on the public attention and MoE ops.

The maths is that of transformers' `GptOssForCausalLM` (eager attention), rounding included: RMSNorm in fp32 and then
cast, the residual stream in the model's dtype, router logits as a linear layer in the model's dtype, YaRN tables
computed in fp32 and cast. Requests of one step are packed along the token axis; keys and values live in paged caches
(`npu_gptoss.attention`). Weights are frozen dataclasses (`weights.py`), put together by `assembly.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from npu_gptoss.attention import AttentionMetadata, paged_attention, write_kv_cache
from npu_gptoss.errors import InputError
from npu_gptoss.model.assembly import assemble
from npu_gptoss.model.checkpoint import iterate_tensors
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import apply_rotary, cos_sin_cache
from npu_gptoss.model.weights import AttentionWeights, Layer, MoEWeights
from npu_gptoss.moe import expert_mlp, route

DTYPES = (torch.float32, torch.bfloat16)

KVCache = tuple[torch.Tensor, torch.Tensor]  # keys, values: [num_blocks, block_size, kv_heads, head_dim] each


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
    def from_tensors(
        cls,
        config: GptOssConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        device: str | torch.device,
        dtype: torch.dtype,
    ) -> GptOss:
        """Builds the model from a stream of (official name, tensor) in the BF16 layout, in any order."""
        weights = assemble(config, tensors, device, dtype)
        return cls(
            config,
            embedding=weights.embedding,
            layers=weights.layers,
            norm=weights.norm,
            lm_head=weights.lm_head,
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
