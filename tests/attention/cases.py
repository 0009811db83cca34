"""Steps of mixed requests over a paged cache, as attention sees them, and the check that every kernel must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata, paged_attention
from tests.tolerances import assert_close

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 8, 2, 64, 16, 64**-0.5
WINDOW = 128

# (query rows, keys) of each request. Around the window's edge, around a block's edge, long and empty ones.
STEPS: dict[str, list[tuple[int, int]]] = {
    "one token": [(1, 1)],
    "decode at the window's edge": [(1, n) for n in (1, 2, 15, 16, 17, 127, 128, 129, 130, 255, 700)],
    "prefill from nothing": [(n, n) for n in (1, 2, 16, 17, 127, 128, 129, 300)],
    "chunks that cross the window": [(64, 100), (64, 164), (200, 328), (3, 131), (300, 900)],
    "mixed, one without rows": [(1, 40), (0, 33), (5, 5), (1, 513), (130, 400)],
}


@dataclass
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: AttentionMetadata
    sinks: torch.Tensor

    def run(self, **changes: object) -> torch.Tensor:
        arguments = {"scale": SCALE, "sliding_window": None, **changes}
        sinks = arguments.pop("sinks", self.sinks)
        return paged_attention(self.query, self.key_cache, self.value_cache, self.metadata, sinks, **arguments)


def make_step(
    requests: list[tuple[int, int]], dtype: torch.dtype = torch.float32, padding: int = 0, seed: int = 0
) -> Step:
    """Random contents; blocks out of order; unused cache blocks and padded rows hold NaN, which must reach nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    blocks = [-(-keys // BLOCK_SIZE) for _, keys in requests]
    total = sum(blocks) + 2
    order = (torch.randperm(total - 2, generator=generator) + 1).tolist()
    table = torch.zeros(len(requests), max(blocks), dtype=torch.int32)
    caches = torch.full((2, total, BLOCK_SIZE, KV_HEADS, HEAD_DIM), float("nan"))
    start, slots = [0], []
    for request, (rows, keys) in enumerate(requests):
        mine = [order.pop() for _ in range(blocks[request])]
        table[request, : len(mine)] = torch.tensor(mine)
        for position in range(keys):
            caches[:, mine[position // BLOCK_SIZE], position % BLOCK_SIZE] = normal(2, KV_HEADS, HEAD_DIM)
        slots += [mine[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(keys - rows, keys)]
        start.append(start[-1] + rows)
    query = normal(start[-1] + padding, HEADS, HEAD_DIM)
    query[start[-1] :] = float("nan")
    metadata = AttentionMetadata(
        tuple(start), tuple(keys for _, keys in requests), table, torch.tensor(slots, dtype=torch.int64)
    )
    # Sinks from -1 to 4: each head has its own, and some outweigh all keys.
    sinks = torch.linspace(-1, 4, HEADS)
    return Step(query.to(dtype), caches[0].to(dtype), caches[1].to(dtype), metadata, sinks.to(dtype))


def check(run: Callable[..., torch.Tensor], step: Step, sliding_window: int | None) -> None:
    """Raises AssertionError when `run(step, sliding_window)` is not what the reference makes of the same inputs."""
    want = step.run(sliding_window=sliding_window, kernel="reference")
    assert_close(run(step, sliding_window), want, step.query.dtype)
