"""gpt-oss for vLLM on NVIDIA GPUs: `npu_gptoss.model.transformer.GptOss` with vLLM's KV cache and scheduler.

vLLM captures a decode step as one graph, attention included. Of a mixed step it captures the parts between attentions
and breaks off at `attend`, which runs with the step's lengths. Both are captured once for each of vLLM's sizes. Padding
rows write no key, read no expert and come out of attention as zeros.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from npu_gptoss.attention import DecodeMetadata
from npu_gptoss.attention.triton.plan import ROUND_KEYS
from npu_gptoss.model.adapters import Adapters
from npu_gptoss.model.assembly import AUTO, FP8
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.update import WeightUpdate
from npu_gptoss.model.values import checked_values
from npu_gptoss.model.warm_up import Reach, compile_programs, launch_programs
from npu_gptoss.model.weights import named_tensors
from npu_gptoss.serving import limits, logger
from npu_gptoss.serving.cuda import invariant
from npu_gptoss.serving.cuda.cache import LayerCache, SinkBackend, Slots, key_value_pair
from npu_gptoss.serving.cuda.limits import FP8_CACHES, batch_invariant
from npu_gptoss.serving.cuda.ranks import TensorParallel
from npu_gptoss.serving.cuda.warm_up import before_ready, reach_ahead
from npu_gptoss.serving.loading import readable
from npu_gptoss.serving.releases.vllm import (
    AttentionLayerBase,
    CUDAGraphMode,
    ForwardContext,
    ParallelLMHead,
    SupportsEagle3,
    SupportsLoRA,
    VllmConfig,
    eager_break_during_capture,
    get_forward_context,
    maybe_transfer_kv_layer,
)


@eager_break_during_capture
@maybe_transfer_kv_layer
def attend(model: GptOssForCausalLM, index: int, layer_name: str, query: torch.Tensor, out: torch.Tensor) -> None:
    """Attention of layer `index` over its cache, into `out`: [rows, heads, head_dim] as query.

    layer_name: vLLM's key to wait for keys that a connector loads, and to give it the new ones.
    """
    pair, steps = model.caches[index].pair, get_forward_context().attn_metadata
    if not steps or pair is None:  # vLLM measures memory, or warms up, without keys
        out.zero_()
        return
    model.gptoss.attend(index, query, pair, steps[layer_name], out=out)


class Updated(nn.Module, AttentionLayerBase):
    """Has no weights: vLLM calls it at the end of an update, as it calls an attention layer."""

    update: WeightUpdate | None = None

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """Raises CheckpointError for an update that is not complete."""
        update, self.update = self.update, None
        if update is not None:
            update.close()

    def get_attn_backend(self) -> type[SinkBackend]:
        return SinkBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> None:
        return None


class GptOssForCausalLM(nn.Module, SupportsEagle3, SupportsLoRA):
    """The class that vLLM builds. `gptoss` holds the weights and is made when they load. With --enable-lora
    `adapters` holds those of `lora.py`.

    A drafter that reads hidden states (EAGLE3, DFlash) finds its target's embedding and vocabulary in `model` and
    `lm_head`.
    """

    gptoss: GptOss
    adapters: Adapters | None = None
    # set for a step that needs no logits, by the sampler (`state.PlainSampler`); then what it gets in their place
    tokens_only = False
    undecided: torch.Tensor | None = None

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = limits.checked_config(vllm_config)
        if batch_invariant():
            invariant.hold()
        self.checkpoint = vllm_config.model_config.model
        self.quantization = vllm_config.model_config.quantization
        self.device, self.dtype = torch.get_default_device(), torch.get_default_dtype()
        self.max_model_len = vllm_config.model_config.max_model_len
        self.ranks = TensorParallel.of(vllm_config)
        here = self.config if self.ranks is None else self.ranks.shard.local(self.config)
        self.caches = [
            LayerCache(
                f"model.layers.{index}.self_attn.attn",
                heads=here.num_attention_heads,
                kv_heads=here.num_key_value_heads,
                head_dim=here.head_dim,
                window=here.window(index),
            )
            for index in range(here.num_hidden_layers)
        ]
        vllm_config.compilation_config.static_forward_context.update({cache.name: cache for cache in self.caches})
        self.aux_layers: frozenset[int] = frozenset()
        self.model, self.lm_head, self.updated = nn.Module(), None, Updated()
        speculative = vllm_config.speculative_config
        self._has_head = speculative is not None and speculative.use_eagle()
        if vllm_config.lora_config is not None:
            from npu_gptoss.serving.cuda import lora

            lora.take_over()
        self._nowhere = Slots(torch.empty(0, dtype=torch.int64))
        shape = (1, vllm_config.cache_config.block_size, here.num_key_value_heads, 2 * here.head_dim)
        narrow = vllm_config.cache_config.cache_dtype in FP8_CACHES
        nothing = torch.zeros(shape, dtype=torch.float8_e4m3fn if narrow else self.dtype)
        self._nothing = key_value_pair(nothing.transpose(1, 2))
        self._ahead = reach_ahead(vllm_config) if self.device.type == "cuda" else None

    @staticmethod
    def get_model_state_cls() -> type:
        """Used by vLLM's second runner; the first lacks the base class."""
        from npu_gptoss.serving.cuda.state import StepState

        return StepState

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """weights: tensors by their official names: first all of the checkpoint; later any part of other weights, which
        go where the first ones are (`WeightUpdate`). Raises CheckpointError."""
        tensors = readable(weights, self.config, self.checkpoint)
        if hasattr(self, "gptoss"):
            self._update(tensors)
        else:
            self._load(tensors)
        return {name for name, _ in self.named_parameters()}

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors = checked_values(tensors, self.dtype, self.checkpoint)
        weights = FP8 if self.quantization == FP8 else AUTO
        self.gptoss = GptOss.from_tensors(
            self.config, tensors, self.device, self.dtype, ranks=self.ranks, weights=weights
        )
        if self.device.type == "cuda":
            self.gptoss.keep_shortlist()
        logger.info(
            "npu-gptoss computes all of gpt-oss by its own kernels, experts in %s; NPU_GPTOSS=0 leaves it to vLLM.",
            self.gptoss.form,
        )
        if self._has_head:
            self._share()
        if self._ahead is not None:
            self._compile(self._ahead)
        if self.device.type == "cuda":
            before_ready(self._warm_up)

    def _update(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """A failure ends the update: the next tensor begins another."""
        update, self.updated.update = self.updated.update, None
        update = update or WeightUpdate(self.gptoss, self.config, "the update")
        for name, tensor in tensors:
            update.take(name, tensor)
            del tensor  # or it would stay in memory while the next one is read
        if not update.complete:
            self.updated.update = update
        else:
            logger.info("npu-gptoss has the new weights, experts in %s.", self.gptoss.form)

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as the kernels read them, for vLLM's checksums. Their names are not official: so no sender of
        weights writes to them past `load_weights`."""
        yield from (
            self._tensors(weights=True) if hasattr(self, "gptoss") else super().named_parameters(*args, **options)
        )

    def named_buffers(self, *args: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors that no checkpoint holds: vLLM keeps them over a sleep at level 2."""
        yield from super().named_buffers(*args, **options)
        if hasattr(self, "gptoss"):
            yield "cos_sin", self.gptoss.cos_sin
            if self.gptoss.shortlist is not None:
                yield from named_tensors(self.gptoss.shortlist, "shortlist")
            yield from self._tensors(weights=False)

    def _tensors(self, *, weights: bool) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors(self.gptoss.weights, "weights"):
            if weights != name.endswith("expert_map"):
                yield name, tensor

    def _compile(self, reach: Reach) -> None:
        """All programs at once, on all cores, before vLLM measures memory: it would compile them one by one."""
        began = time.monotonic()
        compile_programs(self.gptoss, [self._nothing] * len(self.caches), reach)
        logger.info("npu-gptoss compiled the kernels of every step in %.1f s.", time.monotonic() - began)

    def _warm_up(self, reach: Reach) -> None:
        launch_programs(self.gptoss, [cache.pair for cache in self.caches], reach)
        if self.gptoss.shortlist is not None:
            from npu_gptoss.serving.cuda.noise import gumbel_noise

            index = torch.zeros(1, dtype=torch.int64, device=self.device)
            gumbel_noise(index, torch.ones(1, device=self.device), index, index, self.config.vocab_size)

    def _share(self) -> None:
        """Wraps the embedding, complete on every rank, and this rank's rows of lm_head as vLLM modules."""
        self.model.embed_tokens = nn.Embedding.from_pretrained(self.gptoss.embedding)
        with torch.device("meta"):
            self.lm_head = ParallelLMHead(self.config.vocab_size, self.config.hidden_size)
        self.lm_head.weight = nn.Parameter(self.gptoss.lm_head, requires_grad=False)

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        """layers: behind how many layers `forward` also returns the residual stream."""
        self.aux_layers = frozenset(limits.head_layers(layers, self.config))

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        """Returns vLLM's default layers."""
        return 2, len(self.caches) // 2, len(self.caches) - 3

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[rows] -> [rows, hidden]."""
        return self.gptoss.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        intermediate_tensors: None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]]:
        """input_ids, positions [rows]; rows past the step's are padding. -> normed hidden states [rows, hidden], and a
        list of hidden states of earlier layers for a drafter.

        The other two arguments are for pipelines and embedded prompts, which `limits` refuses.
        """
        model, context = self.gptoss, get_forward_context()
        # vLLM marks a missing draft by -1, and from NaN logits its kernel may pick a token past the vocabulary. Either
        # id would raise a device assertion in the embedding, which ends all requests.
        input_ids = input_ids.clamp(0, self.config.vocab_size - 1)
        live = live_rows(context, self.caches[0].name, len(input_ids))
        adapted = self.adapters is not None and self.adapters.active
        layers = self.adapters.step(len(input_ids)) if adapted else model
        slots = context.slot_mapping or {}
        if self.caches[0].pair is None:
            slots = {}
            self._gather_for_nothing()
        residual, delta = model.embed(input_ids), None
        aux: list[torch.Tensor] = []
        for index, cache in enumerate(self.caches):
            where = Slots(slots[cache.name]) if cache.name in slots else self._nowhere
            residual, query = layers.enter(index, residual, delta, positions, cache.pair or self._nothing, where)
            attended = torch.empty_like(query)
            attend(self, index, cache.name, query, attended)
            residual, delta = layers.leave(index, residual, attended, live)
            if index + 1 in self.aux_layers:
                aux.append((residual + delta).to(self.dtype))
        hidden = model.finish(residual, delta)
        return (hidden, aux) if self.aux_layers else hidden

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab] in the model's dtype; the hidden states themselves, once, if the sampler has
        said that it takes tokens from them."""
        self.undecided, self.tokens_only = hidden_states if self.tokens_only else None, False
        if self.undecided is not None:
            return self.undecided
        return self.gptoss.head(hidden_states)

    def _gather_for_nothing(self) -> None:
        """Allocates the memory for attention over the longest prompts while vLLM measures memory."""
        keys, _ = self._nothing
        longest = max(ROUND_KEYS, self.max_model_len)
        torch.empty(2, keys.shape[2] * longest, keys.shape[3], dtype=self.dtype, device=self.device)


def live_rows(context: ForwardContext, name: str, rows: int) -> torch.Tensor | None:
    """Returns [rows], 0 for padding rows, at a fixed address; None if there is no padding.

    A piecewise graph is captured in a decode step and replayed in any step: only its slots mark the padding rows. A
    full graph is captured as a decode step without padding (`cudagraph_runtime_mode` is NONE).
    """
    if context.cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE:
        slots = (context.slot_mapping or {}).get(name)
        return None if slots is None else (slots[:rows] >= 0).int()
    step = (context.attn_metadata or {}).get(name)
    return step.lengths if isinstance(step, DecodeMetadata) else None
