"""vllm-ascend's attention backend with gpt-oss's attention inside.

vllm-ascend keeps the name, the cache layout, graph capture and the operator at which compiled graphs are split
(`vllm.unified_ascend_attention_with_output`, through which connectors load and save). Metadata and arithmetic are ours:

* Lists of lengths are host integers of the real requests. vllm-ascend pads its own for graphs, one entry short.
* Replayed graphs pass padded rows. They reach no operator, and their output is zero.
* A slice by a device scalar would wait for the device in every layer, so there is none.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.attention.ascend import BLOCK_SIZES, causal_mask, no_lse
from npu_gptoss.dense import bound, rotate_write
from npu_gptoss.dense.ascend import packed
from npu_gptoss.dense.operations import ROTATE_WRITE, rotate_write_call
from npu_gptoss.errors import InputError, Refusal
from npu_gptoss.kernels import explain
from npu_gptoss.serving import releases
from npu_gptoss.serving.ascend import captured, start_check
from npu_gptoss.serving.attention import SinkAttentionImpl, step_metadata
from npu_gptoss.serving.releases.ascend import (
    AscendAttentionBackend,
    AscendAttentionBackendImpl,
    AscendAttentionMetadataBuilder,
    AscendAttentionState,
    AscendCommonAttentionMetadata,
    splitting_attention,
)
from npu_gptoss.serving.releases.vllm import AttentionSpec, get_forward_context


class AscendSinkBackend(AscendAttentionBackend):
    @staticmethod
    def get_impl_cls() -> type[AscendSinkImpl]:
        return AscendSinkImpl

    @staticmethod
    def get_metadata_cls() -> type[AttentionMetadata]:
        return AttentionMetadata

    @staticmethod
    def get_builder_cls() -> type[AscendSinkMetadataBuilder]:
        return AscendSinkMetadataBuilder


class AscendSinkMetadataBuilder(AscendAttentionMetadataBuilder):
    """Builds a scheduler step in host integers, without padding."""

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if kv_cache_spec.block_size not in BLOCK_SIZES:
            why = "gpt-oss on Ascend reads its cache in blocks of 128 keys (or a multiple of 128 up to 1024)"
            raise InputError(Refusal("--block-size", kv_cache_spec.block_size, why, "use --block-size 128"))
        self.built: tuple[int, ...] = ()  # lengths of the last built step; see full_graph.guard

    def build(
        self, common_prefix_len: int, common_attn_metadata: AscendCommonAttentionMetadata, model: object = None
    ) -> AttentionMetadata:
        step = step_metadata(common_prefix_len, common_attn_metadata, common_attn_metadata.positions)
        self.built = step.seq_lens
        return step

    def build_for_graph_capture(
        self,
        common_attn_metadata: AscendCommonAttentionMetadata,
        attn_state: AscendAttentionState = AscendAttentionState.DecodeOnly,
        model: object = None,
    ) -> AttentionMetadata:
        """Builds decode rows that see as many keys as their request has rows, one without drafts: the runner's own
        lists are left over from an earlier step."""
        if attn_state != AscendAttentionState.DecodeOnly:
            raise NotImplementedError(f"full graphs of gpt-oss hold decode steps, not {attn_state.name}")
        requests, each = common_attn_metadata.num_reqs, common_attn_metadata.max_query_len
        return AttentionMetadata(
            query_start_loc=tuple(range(0, each * requests + 1, each)),
            seq_lens=(each,) * requests,
            block_table=common_attn_metadata.block_table_tensor[:requests],
            slot_mapping=common_attn_metadata.slot_mapping[: each * requests],
            positions=common_attn_metadata.positions,
        )

    build_for_cudagraph_capture = build_for_graph_capture  # vLLM's name for it, by which vllm-ascend 0.23 calls it


class AscendSinkImpl(SinkAttentionImpl, AscendAttentionBackendImpl):
    """One layer's attention, with the construction and checks of `SinkAttentionImpl`.

    With Triton-Ascend it rotates: queries and keys before RoPE and values come as parts of one tensor, and one launch
    turns them, parts them and writes the cache.
    """

    def __init__(self, num_heads: int, head_size: int, *args: Any, rotary: Any = None, **kwargs: Any) -> None:
        super().__init__(num_heads, head_size, *args, **kwargs)
        heads, dtype = num_heads + 2 * self.num_kv_heads, self.sinks.dtype
        # explained first: what is bound is reported as a kernel that serves
        call = dtype, heads, dtype, head_size
        found = explain(ROTATE_WRITE, *rotate_write_call(*call)).selected
        launched = found is not None and found.solution == "triton_ascend"
        self.rotates = launched and releases.here().launches_triton
        self.rotary, self.turn = rotary, bound(ROTATE_WRITE, *call) if self.rotates else None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        super().process_weights_after_loading(act_dtype)
        for constant in (causal_mask, no_lse):  # made here, because no graph can make them
            constant(self.sinks.device)
        captured.take_up(self.sinks.device)
        rank = self.num_heads, self.num_kv_heads, self.sinks.dtype, self.sinks.device
        start_check.attention(*rank)
        if self.rotates:
            start_check.rotation(*rank)

    def store(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Does as `SinkAttentionImpl`; where this layer rotates, the three are parts of one tensor before RoPE."""
        if not self.rotates:
            return super().store(query, key, value, key_cache, value_cache, metadata)
        return rotate_write(
            packed(query, key, value),
            self.rotary.cos_sin_cache,
            metadata.positions,
            key_cache,
            value_cache,
            metadata,
            kernel=self.turn,
        )

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        attn_metadata: AttentionMetadata | None,
        output: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        trace_flag: bool = True,
    ) -> torch.Tensor:
        """vllm-ascend 0.11.0 calls it from the layer, then (trace_flag False) from its splitting operator."""
        if output is None or output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("gpt-oss attention writes into the caller's buffer, in the model's dtype")
        if trace_flag and splitting_attention is not None:
            splitting_attention(query, key, value, output, layer.layer_name)
            return output
        if not captured.capturing(get_forward_context()):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        key_cache, value_cache = kv_cache
        query = self.store(query, key, value, key_cache, value_cache, attn_metadata)
        return captured.capture(self, layer.layer_name, query, key_cache, value_cache, attn_metadata, output)
