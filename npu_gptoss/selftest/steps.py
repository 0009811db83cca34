"""Attention steps with everything that a real one has: shuffled blocks, a table with columns to spare, padding rows.

A step lies on the CPU; `place` puts it on a device, writes its new keys by the operator, and can then be attended any
number of times. `want` is the definition, in fp32 on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from npu_gptoss.attention import AttentionMetadata, paged_attention, write_kv_cache
from npu_gptoss.kernels import platform_override

WINDOW, BLOCK, HEAD_DIM = 128, 128, 64
SPARE_COLUMNS = 4  # of the block table, which serving makes as wide as the longest context


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst row, relative to the largest row of `want`; infinite for NaN and Inf. Both [rows, …]."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - want).norm(dim=1).max() / want.norm(dim=1).max().clamp(min=1e-30))


@dataclass(frozen=True)
class Placed:
    """A step on a device. Tensors and metadata as `paged_attention` takes them."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    sinks: torch.Tensor

    def attend(self, sliding_window: int | None, kernel: str | None = None) -> torch.Tensor:
        """[rows, heads, 64] in a buffer that held NaN."""
        return paged_attention(
            self.query,
            self.key_cache,
            self.value_cache,
            self.metadata,
            self.sinks,
            scale=HEAD_DIM**-0.5,
            sliding_window=sliding_window,
            out=torch.full_like(self.query, float("nan")),
            kernel=kernel,
        )


@dataclass(frozen=True)
class Step:
    """One attention step on the CPU: what `paged_attention` and `write_kv_cache` are called with.

    query [tokens, heads, 64]; keys, values: [length, kv_heads, 64] of each request, the last `rows` of which are new.
    padding: rows of query and result behind the last request, which hold NaN and come out as zero.
    """

    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    rows: list[int]
    sinks: torch.Tensor
    padding: int = 0

    def place(self, device: torch.device, kernel: str | None = None) -> Placed:
        """Scatters the keys over shuffled blocks, the cache's last among them, the new ones by `write_kv_cache`."""
        lengths = [key.shape[0] for key in self.keys]
        blocks = [-(-length // BLOCK) for length in lengths]
        places = torch.randperm(sum(blocks), generator=torch.Generator().manual_seed(0)) + 1
        table = torch.zeros(len(lengths), max(blocks) + SPARE_COLUMNS, dtype=torch.int32)
        kv_heads = self.keys[0].shape[1]
        caches = torch.zeros(2, sum(blocks) + 1, BLOCK, kv_heads, HEAD_DIM, dtype=self.query.dtype)
        new: list[list[torch.Tensor]] = [[], []]
        slots, used, ends = [], 0, [0]
        for request, (length, rows) in enumerate(zip(lengths, self.rows, strict=True)):
            mine = places[used : used + blocks[request]]
            used += blocks[request]
            table[request, : len(mine)] = mine
            positions = torch.arange(length)
            slot = mine[positions // BLOCK] * BLOCK + positions % BLOCK
            for cache, whole, fresh in zip(caches, (self.keys, self.values), new, strict=True):
                cache.view(-1, kv_heads, HEAD_DIM)[slot[: length - rows]] = whole[request][: length - rows]
                fresh.append(whole[request][length - rows :])
            slots.append(slot[length - rows :])
            ends.append(ends[-1] + rows)
        metadata = AttentionMetadata(
            tuple(ends), tuple(lengths), table.to(device), torch.cat(slots).to(torch.int32).to(device)
        )
        key_cache, value_cache = (cache.contiguous().to(device) for cache in caches)
        key, value = (torch.cat(fresh).to(device) for fresh in new)
        write_kv_cache(key, value, key_cache, value_cache, metadata, kernel=kernel)
        query = torch.nn.functional.pad(self.query, (0, 0, 0, 0, 0, self.padding), value=float("nan"))
        return Placed(query.to(device), key_cache, value_cache, metadata, self.sinks.to(device))

    def run(self, device: torch.device, sliding_window: int | None, kernel: str | None = None) -> torch.Tensor:
        """[tokens, heads, 64] on the CPU."""
        return self.place(device, kernel).attend(sliding_window, kernel).cpu()

    def want(self, sliding_window: int | None) -> torch.Tensor:
        """What the definition says, in fp32 from these inputs."""
        whole = replace(
            self,
            query=self.query.float(),
            keys=[key.float() for key in self.keys],
            values=[value.float() for value in self.values],
            sinks=self.sinks.float(),
        )
        with platform_override("cpu"):
            return whole.run(torch.device("cpu"), sliding_window, "reference")
