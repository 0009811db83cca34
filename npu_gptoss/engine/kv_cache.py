"""The paged key/value cache: fixed blocks of token slots, handed out by number."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.transformer import KVCache

CPU_CACHE_BYTES = 1 << 30
# What is left after the weights also holds activations and logits; the cache takes this share of it.
ACCELERATOR_CACHE_SHARE = 0.8


class BlockAllocator:
    """Hands out block numbers and takes them back. A block belongs to one request at a time."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InputError(
                f"the cache needs at least one block of one token, got {num_blocks} blocks of {block_size}",
                field="num_blocks",
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(reversed(range(num_blocks)))  # a stack: the block freed last is still warm

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Tokens that the whole cache holds."""
        return self.num_blocks * self.block_size

    def grow(self, block_ids: list[int], num_tokens: int) -> bool:
        """Extends `block_ids` until it holds `num_tokens`. With too few free blocks it changes nothing: False."""
        wanted = math.ceil(num_tokens / self.block_size) - len(block_ids)
        if wanted > self.num_free:
            return False
        block_ids.extend(self._free.pop() for _ in range(wanted))
        return True

    def release(self, block_ids: list[int]) -> None:
        """Takes all blocks back and empties the list."""
        self._free.extend(block_ids)
        block_ids.clear()


def allocate_kv_caches(
    config: GptOssConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """A (keys, values) pair a layer, [num_blocks, block_size, kv_heads, head_dim] each, zeroed.

    Zeroed because a kernel may multiply a masked slot by 0, and 0 times leftover NaN is NaN.
    """
    shape = (num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return [(_zeros(shape, dtype, device), _zeros(shape, dtype, device)) for _ in range(config.num_hidden_layers)]


def default_num_blocks(
    config: GptOssConfig, block_size: int, dtype: torch.dtype, device: torch.device, max_batch_size: int
) -> int:
    """Returns the blocks that fit the memory set aside for the cache, and no more than a full batch could ever use."""
    elements = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    bytes_per_block = elements * block_size * dtype.itemsize
    if device.type == "cpu":
        budget = CPU_CACHE_BYTES
    else:
        free, _ = torch.get_device_module(device).mem_get_info(device)
        budget = int(free * ACCELERATOR_CACHE_SHARE)
    useful = max_batch_size * math.ceil(config.max_position_embeddings / block_size)
    if budget < bytes_per_block:
        raise InputError(
            f"{budget} free bytes on {device} do not hold one block of {block_size} tokens ({bytes_per_block})",
            field="num_blocks",
        )
    return min(budget // bytes_per_block, useful)


def slot_mapping(block_ids: Iterable[int], positions: np.ndarray, block_size: int) -> np.ndarray:
    """positions [tokens] of one request -> [tokens] int64 slots in the flattened cache."""
    blocks = np.fromiter(block_ids, dtype=np.int64)
    return blocks[positions // block_size] * block_size + positions % block_size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # calloc: pages that no token touches cost no memory and no time (torch.zeros writes them all)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
