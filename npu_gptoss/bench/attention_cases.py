"""Attention alone at gpt-oss's shapes: decode over a paged cache, causal prefill, cache write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, paged_attention, paged_call, write_kv_cache
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.bench.kernels import Case
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.roofline import BF16_BYTES, Work, attention_decode_work, attention_prefill_work
from npu_gptoss.kernels import signature
from npu_gptoss.model.config import GptOssConfig

Calls = list[Callable[[], object]]


def attention_cases(
    config: GptOssConfig,
    *,
    batches: Sequence[int],
    contexts: Sequence[int],
    prompts: Sequence[int],
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Case]:
    """Decode at every context and batch, prefill of every prompt; each as a full layer and as a window layer."""
    windows = {"full": None, "window": config.sliding_window}
    shapes = AttentionShapes(config, block_size, device, dtype)
    for context in contexts:
        for batch in batches:
            for kind, window in windows.items():
                work = attention_decode_work(config, [context] * batch, window)
                calls = functools.partial(shapes.decode, work, batch, context, window)
                yield shapes.case(f"decode {kind} ctx={context} B={batch}", calls, work, 1, window)
    for tokens in prompts:
        for kind, window in windows.items():
            work = attention_prefill_work(config, tokens, window)
            calls = functools.partial(shapes.prefill, tokens, window)
            yield shapes.case(f"prefill {kind} {tokens}", calls, work, tokens, window)


def write_cases(
    config: GptOssConfig, *, batches: Sequence[int], block_size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """The keys and values of a step's rows into the cache."""
    shapes = AttentionShapes(config, block_size, device, dtype)
    traits = {"head_dim": config.head_dim, "block_size": block_size}
    for batch in batches:
        rows = 2 * batch * config.num_key_value_heads * config.head_dim
        work = Work(kv_bytes=2 * rows * BF16_BYTES)  # read once, written once
        calls = functools.partial(shapes.write, batch)
        yield Case(WRITE_KV, f"rows={batch}", signature(key=dtype, kv=dtype), traits, work, calls)


@dataclass(frozen=True)
class AttentionShapes:
    """Builds the calls of one model's shapes."""

    config: GptOssConfig
    block_size: int
    device: torch.device
    dtype: torch.dtype

    def case(
        self, name: str, calls: Callable[[str], Calls], work: Work, max_query_len: int, window: int | None
    ) -> Case:
        config = self.config
        query, cache = (
            torch.empty(1, *shape, config.head_dim, device="meta", dtype=self.dtype)
            for shape in ((config.num_attention_heads,), (self.block_size, config.num_key_value_heads))
        )
        return Case(PAGED, name, *paged_call(max_query_len, query, cache, query, window), work, calls)

    def decode(self, work: Work, batch: int, context: int, window: int | None, kernel: str) -> Calls:
        """Every call reads other blocks of one cache, scattered over it; lengths are on the device, as in a graph."""
        sets, blocks = rotation(work.kv_bytes, self.device), math.ceil(context / self.block_size)
        caches = self._caches(sets * batch * blocks)
        tables = self._blocks(sets * batch * blocks).view(sets, batch, blocks)
        attend = self._attend(window, kernel)
        calls: Calls = []
        for table in tables:
            metadata = DecodeMetadata(
                lengths=torch.full((batch,), context, device=self.device, dtype=torch.int32),
                block_table=table,
                slot_mapping=table[:, -1].long() * self.block_size + (context - 1) % self.block_size,
                max_seq_len=context,
            )
            query = self._queries(batch)
            calls.append(functools.partial(attend, query, *caches, metadata, out=torch.empty_like(query)))
        return calls

    def prefill(self, tokens: int, window: int | None, kernel: str) -> Calls:
        """One prompt from an empty cache; its keys and values lie in the cache already."""
        blocks = math.ceil(tokens / self.block_size)
        table = self._blocks(blocks)[None]
        positions = torch.arange(tokens, device=self.device)
        places = table[0].long()[positions // self.block_size] * self.block_size + positions % self.block_size
        metadata = AttentionMetadata((0, tokens), (tokens,), table, places)
        query = self._queries(tokens)
        attend = self._attend(window, kernel)
        return [functools.partial(attend, query, *self._caches(blocks), metadata, out=torch.empty_like(query))]

    def write(self, batch: int, kernel: str) -> Calls:
        """Each row into a block of its own."""
        new = [self._random(batch, self.config.num_key_value_heads, self.config.head_dim) for _ in range(2)]
        table = self._blocks(batch)[:, None]
        slots = table[:, 0].long() * self.block_size
        metadata = AttentionMetadata(tuple(range(batch + 1)), (1,) * batch, table, slots)
        return [functools.partial(write_kv_cache, *new, *self._caches(batch), metadata, kernel=kernel)]

    def _attend(self, window: int | None, kernel: str) -> Callable[..., torch.Tensor]:
        heads, scale = self.config.num_attention_heads, self.config.head_dim**-0.5
        return functools.partial(
            paged_attention, sinks=self._random(heads), scale=scale, sliding_window=window, kernel=kernel
        )

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def _queries(self, rows: int) -> torch.Tensor:
        return self._random(rows, self.config.num_attention_heads, self.config.head_dim)

    def _caches(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, self.config.num_key_value_heads, self.config.head_dim)
        return self._random(*shape), self._random(*shape)

    def _blocks(self, count: int) -> torch.Tensor:
        """Their numbers in random order."""
        return torch.randperm(count, device=self.device).to(torch.int32)
