"""Steps of mixed requests over a paged cache, as attention sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata

WINDOW = 128

# (query rows, keys) of each request. Around the window's edge, around a block's edge, long and empty ones.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode at the window's edge": [(1, n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 130, 255, 700)],
    "prefill from nothing": [(n, n) for n in (1, 2, 16, 17, 127, 128, 129, 300)],
    "chunks that cross the window": [(64, 100), (64, 164), (200, 328), (3, 131), (300, 900)],
    "mixed, one without rows": [(1, 40), (0, 33), (5, 5), (1, 513), (130, 400)],
}

# Contexts so long that a row's keys are shared out, and as many rows as a busy server decodes.
LARGE_STEPS: dict[str, list[tuple[int, int]]] = {
    "long contexts": [(1, 3000), (200, 2100), (1, 33)],
    "a long context": [(1, 9001)],
    "130 decode rows": [(1, 1 + 7 * n % 301) for n in range(130)],
}


@dataclass(frozen=True)
class Shape:
    """Of the heads and the cache."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


GPT_OSS = Shape(heads=64, kv_heads=8, head_dim=64, block_size=16)


@dataclass(frozen=True)
class StepTensors:
    """query [tokens + padding, heads, head_dim]; caches [blocks, block_size, kv_heads, head_dim]; sinks [heads]."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: StepMetadata
    sinks: torch.Tensor


def step_tensors(
    requests: Sequence[tuple[int, int]], shape: Shape, generator: torch.Generator, padding: int = 0
) -> StepTensors:
    """Random float32 contents on the CPU; blocks out of order; unused cache blocks and padded rows hold NaN, which must
    reach nothing."""
    size = shape.block_size

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator)

    blocks = [-(-keys // size) for _, keys in requests]
    total = sum(blocks) + 2
    order = (torch.randperm(total - 2, generator=generator) + 1).tolist()
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    caches = torch.full((2, total * size, shape.kv_heads, shape.head_dim), float("nan"))
    start, slots = [0], []
    for request, (rows, keys) in enumerate(requests):
        mine = torch.tensor([order.pop() for _ in range(blocks[request])], dtype=torch.int64)
        table[request, : len(mine)] = mine
        places = (mine[:, None] * size + torch.arange(size)).flatten()[:keys]
        caches[:, places] = normal(keys, 2, shape.kv_heads, shape.head_dim).transpose(0, 1)
        slots.append(places[keys - rows :])
        start.append(start[-1] + rows)
    query = normal(start[-1] + padding, shape.heads, shape.head_dim)
    query[start[-1] :] = float("nan")
    metadata = AttentionMetadata(tuple(start), tuple(keys for _, keys in requests), table, torch.cat(slots))
    caches = caches.view(2, total, size, shape.kv_heads, shape.head_dim)
    # Sinks from -1 to 4: each head has its own, and some outweigh all keys.
    return StepTensors(query, caches[0], caches[1], metadata, torch.linspace(-1, 4, shape.heads))


def plant(step: StepTensors, window: int) -> None:
    """In place: for each request's last row a key at the window's far edge and one just outside that outweigh the rest.

    A window that is wrong by one key would else move a result by less than bfloat16 rounds. The outer key is planted
    for a row whose inner one it is not: for another head.
    """
    _, size, kv_heads, dim = step.key_cache.shape
    metadata = step.metadata
    for request, keys in enumerate(metadata.seq_lens):
        last = metadata.query_start_loc[request + 1] - 1
        if last < metadata.query_start_loc[request]:
            continue
        for distance, head in ((window - 1, 0), (window, step.query.shape[1] // kv_heads - 1)):
            at = keys - 1 - distance
            if at < 0:
                continue
            block = int(metadata.block_table[request, at // size])
            query = step.query[last, head]
            # a score of 8 after the scale: above 128 random ones (whose exponentials sum to about exp(5.3))
            step.key_cache[block, at % size, 0] = query * (8 * dim**0.5 / float(query.pow(2).sum()))


def as_decode(step: StepTensors, max_seq_len: int, padding: int = 0) -> StepTensors:
    """The same requests, one row each, as a graph sees them: lengths on the device, `padding` rows without keys."""
    known = step.metadata
    device = known.block_table.device
    lengths = torch.tensor([*known.seq_lens, *[0] * padding], dtype=torch.int32, device=device)
    table = torch.cat((known.block_table, known.block_table.new_zeros(padding, known.block_table.shape[1])))
    slots = torch.cat((known.slot_mapping, known.slot_mapping.new_full((padding,), -1)))
    query = torch.cat((step.query, step.query.new_full((padding, *step.query.shape[1:]), float("nan"))))
    return dataclasses.replace(step, query=query, metadata=DecodeMetadata(lengths, table, slots, max_seq_len))
