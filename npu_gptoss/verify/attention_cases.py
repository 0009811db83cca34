"""Test inputs of attention: random steps with their KV cache, around the edges of windows and blocks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata, paged_attention, write_kv_cache
from npu_gptoss.attention.padding import with_slack
from npu_gptoss.kernels import platform_override
from npu_gptoss.kernels.dumping import changed
from npu_gptoss.verify.cases import widened

WINDOW = 128

# (query rows, keys) of each request. Around the window's edge, around a block's edge, long and empty ones.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode at the window's edge": [(1, n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 130, 255, 700)],
    "prefill from nothing": [(n, n) for n in (1, 2, 16, 17, 127, 128, 129, 300)],
    "chunks that cross the window": [(64, 100), (64, 164), (200, 328), (3, 131), (300, 900)],
    "mixed, one without rows": [(1, 40), (0, 33), (5, 5), (1, 513), (130, 400)],
}

# Contexts so long that a row's keys are split, and as many rows as a busy server decodes.
LARGE_STEPS: dict[str, list[tuple[int, int]]] = {
    "long contexts": [(1, 3000), (200, 2100), (1, 33)],
    "a long context": [(1, 9001)],
    "130 decode rows": [(1, 1 + 7 * n % 301) for n in range(130)],
}


@dataclass(frozen=True)
class Shape:
    """The sizes of heads and cache."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16


GPT_OSS = Shape(heads=64, kv_heads=8, head_dim=64, block_size=16)


@dataclass
class Step:
    """query [tokens + padding, heads, head_dim]; caches [blocks, block_size, kv_heads, head_dim]; sinks [heads]."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: StepMetadata
    sinks: torch.Tensor

    def to(self, device: str | torch.device, dtype: torch.dtype | None = None) -> Step:
        there = changed(self, lambda t: t.to(device, dtype if t.is_floating_point() else None))
        return dataclasses.replace(there, sinks=with_slack(there.sinks))

    def inputs(self, sliding_window: int | None) -> dict[str, Any]:
        """The arguments of `paged_attention`."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**fields, "scale": self.query.shape[2] ** -0.5, "sliding_window": sliding_window}

    def attend(self, sliding_window: int | None, kernel: str | None = None) -> torch.Tensor:
        """[tokens + padding, heads, head_dim] in a buffer that held NaN, so that unwritten rows show."""
        out = torch.full_like(self.query, float("nan"))
        return paged_attention(**self.inputs(sliding_window), out=out, kernel=kernel)

    def written(self, device: torch.device, kernel: str | None = None) -> Step:
        """Returns the inputs on the device; `write_kv_cache` has written the keys and values of the step's own rows."""
        there, slots = self.to(device), self.metadata.slot_mapping
        new = [cache.flatten(0, 1)[slots].to(device) for cache in (self.key_cache, self.value_cache)]
        caches = [cache.clone() for cache in (there.key_cache, there.value_cache)]
        for cache in caches:
            cache.flatten(0, 1)[there.metadata.slot_mapping] = 0
        metadata = dataclasses.replace(there.metadata, slot_mapping=slots.to(device, torch.int32), plans={})
        write_kv_cache(*new, *caches, metadata, kernel=kernel)
        return dataclasses.replace(there, key_cache=caches[0], value_cache=caches[1], metadata=metadata)

    def want(self, sliding_window: int | None) -> torch.Tensor:
        """The definition's result, in fp32 on the CPU."""
        with platform_override("cpu"):
            return widened(self).attend(sliding_window, "reference")


def one_key_each(slots: torch.Tensor) -> AttentionMetadata:
    """Makes the metadata of a step in which each request has one row and one key, which is stored at its slot."""
    rows = len(slots)
    table = torch.zeros(rows, 1, dtype=torch.int32, device=slots.device)
    return AttentionMetadata(tuple(range(rows + 1)), (1,) * rows, table, slots)


def make_step(
    requests: Sequence[tuple[int, int]],
    shape: Shape,
    generator: torch.Generator,
    padding: int = 0,
    unused: float = math.nan,
    spare_columns: int = 0,
    key_sizes: tuple[float, float] = (1.0, 1.0),
) -> Step:
    """Random float32 contents; blocks out of order; padded rows hold NaN, which must reach nothing.

    unused: the content of cache slots without a key. spare_columns: of the block table, behind the longest request.
    key_sizes: of a request's first key and of its last; with growing keys the running maximum moves in every tile.
    """
    size, device = shape.block_size, generator.device

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator, device=device)

    blocks = [-(-keys // size) for _, keys in requests]
    total = sum(blocks) + 2
    order = (torch.randperm(total - 2, generator=generator, device=device) + 1).tolist()
    table = torch.zeros(len(requests), max(blocks) + spare_columns, dtype=torch.int32, device=device)
    caches = torch.full((2, total * size, shape.kv_heads, shape.head_dim), unused, device=device)
    start, slots = [0], []
    for request, (rows, keys) in enumerate(requests):
        mine = torch.tensor([order.pop() for _ in range(blocks[request])], dtype=torch.int64, device=device)
        table[request, : len(mine)] = mine
        places = (mine[:, None] * size + torch.arange(size, device=device)).flatten()[:keys]
        caches[:, places] = normal(keys, 2, shape.kv_heads, shape.head_dim).transpose(0, 1)
        caches[0, places] *= torch.linspace(*key_sizes, keys, device=device).view(-1, 1, 1)
        slots.append(places[keys - rows :])
        start.append(start[-1] + rows)
    query = normal(start[-1] + padding, shape.heads, shape.head_dim)
    query[start[-1] :] = math.nan
    metadata = AttentionMetadata(tuple(start), tuple(keys for _, keys in requests), table, torch.cat(slots))
    caches = caches.view(2, total, size, shape.kv_heads, shape.head_dim)
    # Sinks from -1 to 4: each head has its own, and some outweigh all keys.
    return Step(query, caches[0], caches[1], metadata, torch.linspace(-1, 4, shape.heads, device=device))


def plant(step: Step, window: int) -> None:
    """Plants, in place, two keys for each request's last row that outweigh the rest: at the window's far edge and just
    outside.

    Without them a window that is wrong by one key would move a result by less than bfloat16 rounds. The two keys are
    planted for different heads.
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


def as_decode(step: Step, max_seq_len: int, padding: int = 0) -> Step:
    """The same requests, one row each, as a graph sees them: lengths on the device, `padding` rows without keys."""
    known = step.metadata
    device = known.block_table.device
    lengths = torch.tensor([*known.seq_lens, *[0] * padding], dtype=torch.int32, device=device)
    table = torch.cat((known.block_table, known.block_table.new_zeros(padding, known.block_table.shape[1])))
    slots = torch.cat((known.slot_mapping, known.slot_mapping.new_full((padding,), -1)))
    query = torch.cat((step.query, step.query.new_full((padding, *step.query.shape[1:]), math.nan)))
    return dataclasses.replace(step, query=query, metadata=DecodeMetadata(lengths, table, slots, max_seq_len))
