"""Cache slots of a step's tokens: vLLM's Triton kernel on CPU tensors, launched by `triton_kernels.py`."""

from __future__ import annotations

from itertools import pairwise

import torch

Grid = tuple[int, ...]


def compute_slot_mapping(
    grid: Grid,
    num_tokens: int,
    max_num_tokens: int,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_table_stride: int,
    block_size: int,
    slot_mapping: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    BLOCK_SIZE: int,
) -> None:
    """vllm/v1/worker/block_table.py of 0.23.0: the slot of each token; PAD_ID after the last token."""
    slot_mapping[num_tokens:max_num_tokens] = PAD_ID
    starts = query_start_loc[: grid[0]].tolist()
    for request, (start, end) in enumerate(pairwise(starts)):
        position = positions[start:end].long()
        span = block_size * TOTAL_CP_WORLD_SIZE
        block = block_table[request].long()[position // span]
        inside = position % span
        local = inside // CP_KV_CACHE_INTERLEAVE_SIZE % TOTAL_CP_WORLD_SIZE == TOTAL_CP_RANK
        offset = inside // (TOTAL_CP_WORLD_SIZE * CP_KV_CACHE_INTERLEAVE_SIZE) * CP_KV_CACHE_INTERLEAVE_SIZE
        slots = block * block_size + offset + inside % CP_KV_CACHE_INTERLEAVE_SIZE
        slot_mapping[start:end] = torch.where(local, slots, PAD_ID).to(slot_mapping.dtype)
