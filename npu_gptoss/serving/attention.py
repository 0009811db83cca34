"""vLLM's attention backend interface over `npu_gptoss.attention`.

Our model passes the backend to each `Attention` layer, so no platform hook is needed. The window is an argument of the
implementation, as the sinks are: vLLM sees it only where layers with a window may form KV cache groups of their own
(`Release.window_groups`). In 0.11.0 its CPU runner and vllm-ascend take one group.
"""

from __future__ import annotations

import torch

from npu_gptoss.attention import AttentionMetadata, LayerKernels, paged_attention, write_kv_cache
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import expect, selected_kernels
from npu_gptoss.moe.operations import EXPERTS
from npu_gptoss.serving import logger
from npu_gptoss.serving.releases.vllm import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadataBuilder,
    AttentionSpec,
    AttentionType,
    CommonAttentionMetadata,
    FullAttentionSpec,
    VllmConfig,
    host_lengths,
)

CACHE_DTYPES = ("auto", "bfloat16", "float16", "float32")  # limits.py lets the model's own through, and auto
BLOCK = 128  # tokens of a KV cache block, for the log's kernel choice before the cache exists


class SinkAttentionBackend(AttentionBackend):
    """Paged attention with sinks and windows on any device that has a kernel in `npu_gptoss.attention`."""

    accept_output_buffer = True

    @staticmethod
    def get_name() -> str:
        return "NPU_GPTOSS"

    @staticmethod
    def get_impl_cls() -> type[SinkAttentionImpl]:
        return SinkAttentionImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[SinkAttentionMetadataBuilder]:
        return SinkAttentionMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        if cache_dtype_str not in CACHE_DTYPES:
            raise InputError(
                f"the KV cache of gpt-oss has the model's dtype: expected 'auto' or its name, got {cache_dtype_str!r}",
                field="--kv-cache-dtype",
            )
        return (2, num_blocks, block_size, num_kv_heads, head_size)


def step_metadata(
    common_prefix_len: int, common: CommonAttentionMetadata, positions: torch.Tensor | None = None
) -> AttentionMetadata:
    """Returns a scheduler step with its real requests and tokens only, without padding."""
    if common_prefix_len:
        raise RuntimeError(f"cascade attention (a common prefix of {common_prefix_len} tokens) supports no sinks")
    query_start_loc, seq_lens = host_lengths(common)
    return AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        block_table=common.block_table_tensor[: len(seq_lens)],
        slot_mapping=common.slot_mapping[: query_start_loc[-1]],
        positions=positions,
    )


class SinkAttentionMetadataBuilder(AttentionMetadataBuilder[AttentionMetadata]):
    """Builds a scheduler step in host integers, so that no kernel copies lengths from the device."""

    reorder_batch_threshold = None  # prefills and decodes may come in any order

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if not isinstance(kv_cache_spec, FullAttentionSpec) or kv_cache_spec.sliding_window is not None:
            raise RuntimeError(
                f"every gpt-oss layer keeps all of its keys and applies its window itself, but vLLM planned "
                f"{kv_cache_spec} for {layer_names[0]}"
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AttentionMetadata:
        return step_metadata(common_prefix_len, common_attn_metadata)

    def use_cascade_attention(self, *args: object, **kwargs: object) -> bool:
        return False


class SinkAttentionImpl(AttentionImpl[AttentionMetadata]):
    """One layer's attention: checks at construction and after loading that its sinks and its window are present."""

    rotates = False  # it gets queries and keys before RoPE

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        sinks: torch.Tensor | None = None,
        window: int | None,
        owner: str = "a layer",
        rotary: object = None,
        **unknown: object,
    ) -> None:
        """`sinks` [num_heads] is the layer's parameter; `window` counts the visible keys including the token's own,
        None on a full layer; `owner` names the layer in errors; `rotary` is for implementations that rotate. Raises
        InputError for options that would silently be dropped."""
        known = {
            "alibi_slopes": (alibi_slopes, None),
            "sliding_window": (sliding_window, None, window),
            "kv_cache_dtype": (kv_cache_dtype, *CACHE_DTYPES),
            "logits_soft_cap": (logits_soft_cap, None, 0),
            "attn_type": (attn_type, AttentionType.DECODER),
            "kv_sharing_target_layer_name": (kv_sharing_target_layer_name, None),
        }
        if unknown:
            said = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
            raise InputError(f"{owner}: gpt-oss attention does not know {said}", field=next(iter(unknown)))
        for name, (got, *expected) in known.items():
            if got not in expected:
                said = f"{owner}: gpt-oss attention is causal, with one sink a head, and has {name}={expected[0]!r}"
                raise InputError(f"{said}, got {got!r}", field=name)
        expect("sinks", sinks, num_heads)
        if window is not None and window < 1:
            raise InputError(f"{owner}: a window has its own key at least, got {window}", field="window")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.window = window
        self.owner = owner
        self.sinks = sinks
        self.kernels = LayerKernels(window)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """vLLM calls it after loading: a sink that was never written is NaN (see model.py)."""
        if not torch.isfinite(self.sinks).all():
            raise InputError(
                f"{self.owner}.sinks was not filled by the checkpoint, or is not finite", field=f"{self.owner}.sinks"
            )
        if self.owner.endswith("layers.0.self_attn"):
            logger.info("%s", self.what_serves(act_dtype))

    def what_serves(self, dtype: torch.dtype) -> str:
        """Returns a sentence for the log. The experts' kernels are chosen before attention layers are processed."""
        query = torch.empty(1, self.num_heads, self.head_size, dtype=dtype, device="meta")
        cache = torch.empty(1, BLOCK, self.num_kv_heads, self.head_size, dtype=dtype, device="meta")
        _, attention = LayerKernels(self.window).of(query, cache, self.sinks)
        experts = sorted({solution for name, _, solution in selected_kernels() if name == EXPERTS.name})
        return (
            f"npu-gptoss computes attention by {attention.of(1).kernel.solution} and the experts by "
            f"{' and '.join(experts)}; NPU_GPTOSS=0 leaves gpt-oss to vLLM."
        )

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Writes the step's keys and values into the cache; returns the queries for attention."""
        write, _ = self.kernels.of(query, key_cache, self.sinks)
        write_kv_cache(key, value, key_cache, value_cache, metadata, kernel=write)
        return query

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        attn_metadata: AttentionMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output [rows, heads, head_dim]; key, value [rows, kv_heads, head_dim]; kv_cache as in
        `get_kv_cache_shape`. Rows past the step's tokens are padding: their output is zero. Without metadata (vLLM's
        profile run has no cache yet) all of the output is zero."""
        if output is None or output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("gpt-oss attention writes into the caller's buffer, in the model's dtype")
        if attn_metadata is None:
            return output.zero_()
        key_cache, value_cache = kv_cache
        _, attend = self.kernels.of(query, key_cache, self.sinks)
        query = self.store(query, key, value, key_cache, value_cache, attn_metadata)
        return paged_attention(
            query,
            key_cache,
            value_cache,
            attn_metadata,
            self.sinks,
            scale=self.scale,
            sliding_window=self.window,
            out=output,
            kernel=attend,
        )
