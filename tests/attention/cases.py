"""Steps of mixed requests over a paged cache, as attention sees them, and the check that every kernel must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, StepMetadata, paged_attention
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


@dataclass(frozen=True)
class Shape:
    """Of the heads and the cache."""

    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    block_size: int = BLOCK_SIZE


GPT_OSS = Shape(heads=64, kv_heads=8, head_dim=64, block_size=16)


@dataclass
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: StepMetadata
    sinks: torch.Tensor

    def run(self, **changes: object) -> torch.Tensor:
        arguments = {"scale": SCALE, "sliding_window": None, **changes}
        sinks = arguments.pop("sinks", self.sinks)
        return paged_attention(self.query, self.key_cache, self.value_cache, self.metadata, sinks, **arguments)


def make_step(
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
    shape: Shape | None = None,
    device: str = "cpu",
) -> Step:
    """Random contents; blocks out of order; unused cache blocks and padded rows hold NaN, which must reach nothing."""
    shape = shape or Shape(block_size=BLOCK_SIZE)  # which a test may have changed
    generator = torch.Generator().manual_seed(seed)
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
    metadata = AttentionMetadata(
        tuple(start), tuple(keys for _, keys in requests), table.to(device), torch.cat(slots).to(device)
    )
    # Sinks from -1 to 4: each head has its own, and some outweigh all keys.
    sinks = torch.linspace(-1, 4, shape.heads)
    caches = caches.view(2, total, size, shape.kv_heads, shape.head_dim)
    return Step(
        query.to(device, dtype),
        caches[0].to(device, dtype),
        caches[1].to(device, dtype),
        metadata,
        sinks.to(device, dtype),
    )


def as_decode(step: Step, max_seq_len: int, padding: int = 0) -> Step:
    """The same requests, one row each, as a graph sees them: lengths on the device, `padding` rows without keys."""
    known = step.metadata
    device = known.block_table.device
    lengths = torch.tensor([*known.seq_lens, *[0] * padding], dtype=torch.int32, device=device)
    table = torch.cat((known.block_table, known.block_table.new_zeros(padding, known.block_table.shape[1])))
    slots = torch.cat((known.slot_mapping, known.slot_mapping.new_full((padding,), -1)))
    query = torch.cat((step.query, step.query.new_full((padding, *step.query.shape[1:]), float("nan"))))
    return dataclasses.replace(step, query=query, metadata=DecodeMetadata(lengths, table, slots, max_seq_len))


def check(
    run: Callable[..., torch.Tensor], step: Step, sliding_window: int | None, *, rounded_weights: bool = False
) -> None:
    """Raises AssertionError when `run(step, sliding_window)` is not what the reference makes of the same inputs.

    rounded_weights: the kernel multiplies values by weights rounded to bfloat16, as the tensor cores take them. Each
    product is then off by up to 2^-9 of itself however much the products cancel, so 2^-9 of the sum of their sizes,
    which is the same attention over absolute values.
    """
    want = step.run(sliding_window=sliding_window, kernel="reference")
    slack = 0.0
    if rounded_weights and step.query.dtype == torch.bfloat16:
        sizes = dataclasses.replace(step, value_cache=step.value_cache.abs())
        slack = 2**-9 * float(sizes.run(sliding_window=sliding_window, kernel="reference").max())
    assert_close(run(step, sliding_window), want, step.query.dtype, atol=slack)
