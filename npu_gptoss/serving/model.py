"""gpt-oss for vLLM: the class that replaces vLLM's own `GptOssForCausalLM`.

The blocks are our own, written on vLLM's layers: upstream's blocks build attention, rope and experts from names of
their module, and its loader moves tensors to CUDA. Ours add the parts of gpt-oss that stock vLLM (or vllm-ascend)
drops: the attention backend with sinks and windows, the experts with biases and the clamped SwiGLU, the rope without
rounding, a loader that accounts for every tensor. `GptOssModel` is the unit of torch.compile, as upstream's is; modules
and parameters have the official checkpoint's names (q, k and v share one matrix).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import torch
from torch import nn

from npu_gptoss.attention.padding import with_slack
from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig, tensor_parallel_objection
from npu_gptoss.model.rope import score_scale
from npu_gptoss.serving import compat, limits, loading, releases
from npu_gptoss.serving.attention import SinkAttentionBackend
from npu_gptoss.serving.expert_weights import kept_packed
from npu_gptoss.serving.moe import ExpertsConfig, GptOssExpertsMethod
from npu_gptoss.serving.releases.vllm import (
    EXPERTS_LAYER_OPTIONS,
    Attention,
    AttentionBackend,
    CacheConfig,
    FusedMoE,
    IntermediateTensors,
    LogitsProcessor,
    ParallelLMHead,
    PPMissingLayer,
    QKVParallelLinear,
    RMSNorm,
    RowParallelLinear,
    SupportsEagle3,
    SupportsPP,
    VllmConfig,
    VocabParallelEmbedding,
    current_platform,
    extract_layer_index,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    make_empty_intermediate_tensors_factory,
    make_layers,
    maybe_prefix,
    sequence_parallel_chunk,
    support_torch_compile,
    tensor_model_parallel_all_gather,
)
from npu_gptoss.serving.rotary import rotary_embedding


def for_this_platform() -> tuple[type[AttentionBackend], type[GptOssExpertsMethod]]:
    """Returns the attention backend and the experts' method for vLLM's layers on this platform."""
    if current_platform.device_type != "npu":
        return SinkAttentionBackend, GptOssExpertsMethod
    from npu_gptoss.serving.ascend.attention import AscendSinkBackend
    from npu_gptoss.serving.ascend.moe import AscendExpertsMethod

    return AscendSinkBackend, AscendExpertsMethod


class GptOssAttention(nn.Module):
    """One layer's attention on this rank's heads."""

    def __init__(self, config: GptOssConfig, cache_config: CacheConfig | None, prefix: str) -> None:
        super().__init__()
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            config.head_dim,
            config.num_attention_heads,
            config.num_key_value_heads,
            prefix=f"{prefix}.qkv_proj",
        )
        self.o_proj = RowParallelLinear(
            config.num_attention_heads * config.head_dim, config.hidden_size, prefix=f"{prefix}.o_proj"
        )
        self.num_heads = self.qkv_proj.num_heads
        self.first_head = get_tensor_model_parallel_rank() * self.num_heads
        num_kv_heads = self.qkv_proj.num_kv_heads
        self.split_sizes = [heads * config.head_dim for heads in (self.num_heads, num_kv_heads, num_kv_heads)]
        self.rotary_emb = rotary_embedding(config)
        # NaN until loaded: the backend refuses sinks that the checkpoint did not fill
        self.sinks = nn.Parameter(with_slack(torch.full((self.num_heads,), float("nan"))), requires_grad=False)
        window = config.window(extract_layer_index(prefix))
        self.attn = Attention(
            self.num_heads,
            config.head_dim,
            score_scale(config),
            num_kv_heads=num_kv_heads,
            cache_config=cache_config,
            prefix=f"{prefix}.attn",
            per_layer_sliding_window=window if releases.here().window_groups else None,
            attn_backend=for_this_platform()[0],
            sinks=self.sinks,
            window=window,
            owner=prefix,
            rotary=self.rotary_emb,
        )
        self.rotates = self.attn.impl.rotates

    def forward(self, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """hidden_states [tokens, hidden] -> [tokens, hidden], summed over ranks."""
        qkv, _ = self.qkv_proj(hidden_states)
        query, key, value = qkv.split(self.split_sizes, dim=-1)
        if not self.rotates:
            query, key = self.rotary_emb(positions, query, key)
            value = value.contiguous()
        output, _ = self.o_proj(self.attn(query, key, value))
        return output


class MixtureOfExperts(nn.Module):
    """The router and this rank's experts."""

    def __init__(self, config: GptOssConfig, is_sequence_parallel: bool, packed: bool, prefix: str) -> None:
        super().__init__()
        self.is_sequence_parallel = is_sequence_parallel
        self.router = nn.Linear(config.hidden_size, config.num_local_experts)
        self.experts = FusedMoE(
            num_experts=config.num_local_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            renormalize=True,
            quant_config=ExpertsConfig(for_this_platform()[1], config.swiglu_limit, packed),
            prefix=f"{prefix}.experts",
            has_bias=True,
            activation="swigluoai",
            is_sequence_parallel=is_sequence_parallel,
            **EXPERTS_LAYER_OPTIONS,
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden], summed over ranks."""
        num_tokens = hidden_states.shape[0]
        if self.is_sequence_parallel:
            hidden_states = sequence_parallel_chunk(hidden_states)
        hidden_states = self.experts(hidden_states=hidden_states, router_logits=self.router(hidden_states))
        if self.is_sequence_parallel:
            hidden_states = tensor_model_parallel_all_gather(hidden_states.contiguous(), 0)[:num_tokens]
        return hidden_states


class DecoderLayer(nn.Module):
    def __init__(self, config: GptOssConfig, vllm_config: VllmConfig, packed: bool, prefix: str) -> None:
        super().__init__()
        self.self_attn = GptOssAttention(config, vllm_config.cache_config, f"{prefix}.self_attn")
        spread = vllm_config.parallel_config.use_sequence_parallel_moe
        self.mlp = MixtureOfExperts(config, spread, packed, f"{prefix}.mlp")
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, hidden_states: torch.Tensor, positions: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the layer's output and the residual stream, which the next norm adds."""
        if residual is None:
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(hidden_states, positions)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


# The dynamic dimensions are named because vLLM infers them from annotations, and postponed annotations are text.
@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class GptOssModel(nn.Module):
    """Embedding, this pipeline stage's layers and the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = limits.checked_config(vllm_config)
        stage = get_pp_group()
        self.embed_tokens = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size) if stage.is_first_rank else PPMissingLayer()
        )
        packed = kept_packed(vllm_config, config)
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: DecoderLayer(config, vllm_config, packed, prefix),
            prefix=f"{prefix}.layers",
        )
        if self.layers[self.start_layer].self_attn.rotates:
            # vLLM's hash of it names the compiled graphs in its cache: this one must not be taken for the other
            vllm_config.additional_config = {**(vllm_config.additional_config or {}), "npu_gptoss_rotates": True}
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps) if stage.is_last_rank else PPMissingLayer()
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )
        self.aux_layers: tuple[int, ...] = ()  # behind how many layers an EAGLE3 head reads the residual stream

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]] | IntermediateTensors:
        """Token ids [tokens] (or embeddings) -> normed hidden states [tokens, hidden], or this stage's streams; with
        an EAGLE3 head also the residual streams that it reads."""
        if get_pp_group().is_first_rank:
            hidden_states = self.get_input_embeddings(input_ids) if inputs_embeds is None else inputs_embeds
            residual = None
        else:
            hidden_states, residual = intermediate_tensors["hidden_states"], intermediate_tensors["residual"]
        aux = []
        for behind, layer in enumerate(self.layers[self.start_layer : self.end_layer], self.start_layer + 1):
            hidden_states, residual = layer(hidden_states, positions, residual)
            if behind in self.aux_layers:
                aux.append(hidden_states + residual)
        if not get_pp_group().is_last_rank:
            return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})
        hidden_states, _ = self.norm(hidden_states, residual)
        return (hidden_states, aux) if aux else hidden_states


class GptOssForCausalLM(nn.Module, SupportsEagle3, SupportsPP):
    """vLLM's registry gives this class for GptOssForCausalLM once the plugin is loaded."""

    # vLLM's loader: no fall-back to pickled files
    allow_patterns_overrides: ClassVar[list[str]] = ["*.safetensors"]
    fall_back_to_pt_during_load = False

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        compat.require_essential()
        self.gpt_oss_config = limits.checked_config(vllm_config)
        self.dtype = vllm_config.model_config.dtype
        self.checkpoint = vllm_config.model_config.model
        _check_sharding(self.gpt_oss_config)
        self.model = GptOssModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = (
            ParallelLMHead(
                self.gpt_oss_config.vocab_size, self.gpt_oss_config.hidden_size, prefix=maybe_prefix(prefix, "lm_head")
            )
            if get_pp_group().is_last_rank
            else PPMissingLayer()
        )
        self.logits_processor = LogitsProcessor(self.gpt_oss_config.vocab_size)
        self.make_empty_intermediate_tensors = self.model.make_empty_intermediate_tensors

    def get_input_embeddings(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.model.get_input_embeddings(input_ids)

    embed_input_ids = get_input_embeddings  # the name in later releases

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """layers: behind how many layers `forward` also returns the residual stream."""
        self.model.aux_layers = limits.head_layers(layers, self.gpt_oss_config)

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Returns vLLM's default layers."""
        layers = self.gpt_oss_config.num_hidden_layers
        return 2, layers // 2, layers - 3

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Loads vLLM's stream of official tensors; raises CheckpointError unless all tensors fit."""
        return loading.load_weights(self, weights, self.gpt_oss_config, dtype=self.dtype, where=self.checkpoint)


def _check_sharding(config: GptOssConfig) -> None:
    ranks = get_tensor_model_parallel_world_size()
    if objection := tensor_parallel_objection(config, ranks):
        raise InputError(objection)
