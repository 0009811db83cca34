"""The attention layer's interface to vLLM: the KV cache that vLLM keeps, and the metadata of a step.

The model computes attention itself (`npu_gptoss.attention`), so a layer here only holds its cache. Layers with a window
form a separate group, and vLLM frees their blocks behind the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata
from npu_gptoss.model.transformer import KVCache
from npu_gptoss.serving.cuda.limits import batch_invariant
from npu_gptoss.serving.releases.vllm import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayerBase,
    AttentionMetadataBuilder,
    AttentionSpec,
    CommonAttentionMetadata,
    FullAttentionSpec,
    KVCacheLayout,
    MultipleOf,
    SlidingWindowSpec,
    VllmConfig,
    get_block_table_width,
    get_kv_quant_mode,
    kv_cache_dtype_str_to_dtype,
)

# Block sizes of the kernels, in the form of vLLM's own backends: so an EAGLE3 head's layer has the same kind as the
# layers without a window. A list of sizes makes another kind, and vLLM then builds a group, a block table and metadata
# for each layer at every step: 25 of each for 20b.
BLOCK_SIZES = MultipleOf(16)


@dataclass(frozen=True)
class Slots:
    """The step's slots for the projections. slot_mapping [rows]: where each row's key and value go; negative: nowhere.

    The tensor keeps its address and vLLM fills the padding rows with -1, so a graph may hold it.
    """

    slot_mapping: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return self.slot_mapping.shape[0]


class StepBuilder(AttentionMetadataBuilder[StepMetadata]):
    """Builds a step's metadata for the layers of one group, without a copy from the device.

    A request that verifies drafts has several decode rows, and only the device knows how many keys they see: it may
    have rejected drafts that the host still counts. Each such row becomes a separate request with the same blocks.
    """

    _cudagraph_support = AttentionCGSupport.NEVER if batch_invariant() else AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: AttentionSpec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculative = vllm_config.speculative_config
        self.most_rows = 1 + (speculative.num_speculative_tokens or 0 if speculative else 0)
        if self.most_rows > 1:
            rows = vllm_config.scheduler_config.max_num_seqs * self.most_rows
            # the width of the runner's tables, which exceeds the need of the longest request
            width = get_block_table_width(
                kv_cache_spec.max_num_blocks_per_req(vllm_config, vllm_config.model_config.max_model_len),
                kv_cache_spec.block_size,
                token_alignment=kv_cache_spec.block_table_token_alignment,
            )
            self._lengths = torch.zeros(rows, dtype=torch.int32, device=device)
            self._table = torch.zeros(rows, width, dtype=torch.int32, device=device)
            self._behind = torch.arange(1 - self.most_rows, 1, dtype=torch.int32, device=device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StepMetadata:
        """Uses the device's lengths if all requests have the same few rows: a full graph reads them at each replay, and
        padding rows have none. Else uses the host's lengths, which are exact unless drafts are verified."""
        common, requests = common_attn_metadata, common_attn_metadata.num_reqs
        rows, table, lengths = common.max_query_len, common.block_table_tensor[:requests], common.seq_lens[:requests]
        uniform = rows <= self.most_rows and requests * rows == common.num_actual_tokens
        if uniform and not batch_invariant():  # else the lengths are the host's
            if rows > 1:
                table, lengths = self._each_row(table, lengths, rows)
            return DecodeMetadata(lengths, table, common.slot_mapping[: requests * rows], max(common.max_seq_len, 1))
        starts = common.query_start_loc_cpu[: requests + 1].tolist()
        most = common.seq_lens_cpu_upper_bound[:requests].tolist()
        step = AttentionMetadata(tuple(starts), tuple(most), table, common.slot_mapping[: starts[-1]])
        return step if self.most_rows == 1 else verifying(step, lengths, common.is_prefilling[:requests].tolist())

    def _each_row(self, table: torch.Tensor, lengths: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a table and lengths by row instead of by request, at fixed addresses."""
        requests, width = table.shape
        behind = self._behind[self.most_rows - rows :]
        tables, seen = self._table[: requests * rows, :width], self._lengths[: requests * rows]
        tables.view(requests, rows, width).copy_(table[:, None])
        torch.clamp(lengths[:, None] + behind, min=0, out=seen.view(requests, rows))
        return tables, seen


def verifying(step: AttentionMetadata, lengths: torch.Tensor, prefilling: list[bool]) -> AttentionMetadata:
    """Splits each decoding request into one request for each row, with the keys that `lengths` gives."""
    starts, most, request, behind = [0], [], [], []
    for index, (first, end) in enumerate(pairwise(step.query_start_loc)):
        for piece_end in (end,) if prefilling[index] else range(first + 1, end + 1):
            starts.append(piece_end)
            request.append(index)
            behind.append(end - piece_end)
            most.append(step.seq_lens[index] - behind[-1])
    on_host = torch.tensor([request, behind], pin_memory=lengths.device.type != "cpu")
    chosen = on_host.to(lengths.device, non_blocking=True)
    return AttentionMetadata(
        tuple(starts),
        tuple(most),
        step.block_table[chosen[0]],
        step.slot_mapping,
        (lengths[chosen[0]] - chosen[1]).int(),
    )


class SinkBackend(AttentionBackend):
    """Describes to vLLM the caches that the kernels accept."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        raise NotImplementedError("the model computes its attention itself")

    @staticmethod
    def get_builder_cls() -> type[StepBuilder]:
        return StepBuilder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: AttentionSpec | None = None) -> list[int | MultipleOf]:
        return [BLOCK_SIZES]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBNHC,)


def key_value_pair(kv_cache: torch.Tensor) -> KVCache:
    """A cache in vLLM's layout -> its keys and values, as the kernels take them."""
    if kv_cache.dtype == torch.uint8:  # vLLM has the bytes of FP8
        kv_cache = kv_cache.view(torch.float8_e4m3fn)
    keys, values = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


class LayerCache(AttentionLayerBase):
    """Keys and values of one layer: `pair`, [blocks, block_size, kv_heads, head_dim] each, and None without a cache."""

    pair: KVCache | None

    def __init__(self, name: str, *, heads: int, kv_heads: int, head_dim: int, window: int | None) -> None:
        """heads: query heads of this rank, as kv_heads; window: keys that a query sees, its own included, or None."""
        self.name, self.window = name, window
        self.num_heads, self.num_kv_heads, self.head_size = heads, kv_heads, head_dim
        self.kv_cache = torch.empty(0)

    @property
    def kv_cache(self) -> torch.Tensor:
        """The cache in the layout of vLLM's connectors: [blocks, kv_heads, block_size, 2 * head_dim], each key followed
        by its value. Empty before vLLM allocates it and after vLLM frees it."""
        return self._kv_cache

    @kv_cache.setter
    def kv_cache(self, kv_cache: torch.Tensor) -> None:
        self._kv_cache = kv_cache
        self.pair = key_value_pair(kv_cache) if len(kv_cache) else None

    def get_attn_backend(self) -> type[AttentionBackend]:
        return SinkBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> AttentionSpec:
        shape = {
            "block_size": vllm_config.cache_config.block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            # vLLM's own for this option, so that the layer of an EAGLE3 head has the same kind
            "dtype": kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, vllm_config.model_config),
            "kv_quant_mode": get_kv_quant_mode(vllm_config.cache_config.cache_dtype),
        }
        return (
            FullAttentionSpec(**shape)
            if self.window is None
            else SlidingWindowSpec(**shape, sliding_window=self.window)
        )
