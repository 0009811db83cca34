"""Attention alone at gpt-oss's shapes: decode over a paged cache, causal prefill, cache write."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence

import torch

from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, paged_attention, write_kv_cache
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
    setting = (config, block_size, device, dtype)
    for context in contexts:
        for batch in batches:
            for kind, window in windows.items():
                work = attention_decode_work(config, [context] * batch, window)
                yield _case(
                    f"decode {kind} ctx={context} B={batch}",
                    functools.partial(_decode, work, batch, context, window, *setting),
                    work,
                    window,
                    *setting,
                )
    for tokens in prompts:
        for kind, window in windows.items():
            work = attention_prefill_work(config, tokens, window)
            build = functools.partial(_prefill, tokens, window, *setting)
            yield _case(f"prefill {kind} {tokens}", build, work, window, *setting)


def write_cases(
    config: GptOssConfig, *, batches: Sequence[int], block_size: int, device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """The keys and values of a step's rows into the cache."""
    traits = {"head_dim": config.head_dim, "block_size": block_size}
    for batch in batches:
        rows = 2 * batch * config.num_key_value_heads * config.head_dim
        yield Case(
            WRITE_KV,
            f"rows={batch}",
            signature(key=dtype, kv=dtype),
            traits,
            Work(kv_bytes=2 * rows * BF16_BYTES),  # read once, written once
            functools.partial(_write, batch, config, block_size, device, dtype),
        )


def _case(
    name: str,
    build: Callable[[str], Calls],
    work: Work,
    window: int | None,
    config: GptOssConfig,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Case:
    traits = {"head_dim": config.head_dim, "block_size": block_size, "sliding_window": window is not None}
    return Case(PAGED, name, signature(query=dtype, kv=dtype, sinks=dtype), traits, work, build)


def _caches(
    blocks: int, config: GptOssConfig, block_size: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (blocks, block_size, config.num_key_value_heads, config.head_dim)
    return torch.randn(shape, device=device, dtype=dtype), torch.randn(shape, device=device, dtype=dtype)


def _decode(
    work: Work,
    batch: int,
    context: int,
    window: int | None,
    config: GptOssConfig,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str,
) -> Calls:
    """Every call reads other blocks of one cache, scattered over it; lengths are on the device, as in a full graph."""
    sets, blocks = rotation(work.kv_bytes, device), math.ceil(context / block_size)
    keys, values = _caches(sets * batch * blocks, config, block_size, device, dtype)
    tables = torch.randperm(sets * batch * blocks, device=device).to(torch.int32).view(sets, batch, blocks)
    heads = (config.num_attention_heads, config.head_dim)
    sinks = torch.randn(config.num_attention_heads, device=device, dtype=dtype)
    attend = functools.partial(paged_attention, scale=config.head_dim**-0.5, sliding_window=window, kernel=kernel)
    calls: Calls = []
    for table in tables:
        metadata = DecodeMetadata(
            lengths=torch.full((batch,), context, device=device, dtype=torch.int32),
            block_table=table,
            slot_mapping=table[:, -1].long() * block_size + (context - 1) % block_size,
            max_seq_len=context,
        )
        query = torch.randn(batch, *heads, device=device, dtype=dtype)
        calls.append(functools.partial(attend, query, keys, values, metadata, sinks, out=torch.empty_like(query)))
    return calls


def _prefill(
    tokens: int,
    window: int | None,
    config: GptOssConfig,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
    kernel: str,
) -> Calls:
    """One prompt from an empty cache; its keys and values lie in the cache already."""
    blocks = math.ceil(tokens / block_size)
    keys, values = _caches(blocks, config, block_size, device, dtype)
    table = torch.randperm(blocks, device=device).to(torch.int32)[None]
    positions = torch.arange(tokens, device=device)
    metadata = AttentionMetadata(
        query_start_loc=(0, tokens),
        seq_lens=(tokens,),
        block_table=table,
        slot_mapping=table[0].long()[positions // block_size] * block_size + positions % block_size,
    )
    query = torch.randn(tokens, config.num_attention_heads, config.head_dim, device=device, dtype=dtype)
    sinks = torch.randn(config.num_attention_heads, device=device, dtype=dtype)
    attend = functools.partial(paged_attention, scale=config.head_dim**-0.5, sliding_window=window, kernel=kernel)
    return [functools.partial(attend, query, keys, values, metadata, sinks, out=torch.empty_like(query))]


def _write(
    batch: int, config: GptOssConfig, block_size: int, device: torch.device, dtype: torch.dtype, kernel: str
) -> Calls:
    """Each row into a block of its own."""
    keys, values = _caches(batch, config, block_size, device, dtype)
    shape = (batch, config.num_key_value_heads, config.head_dim)
    new = [torch.randn(shape, device=device, dtype=dtype) for _ in range(2)]
    table = torch.randperm(batch, device=device).to(torch.int32)[:, None]
    metadata = AttentionMetadata(
        query_start_loc=tuple(range(batch + 1)),
        seq_lens=(1,) * batch,
        block_table=table,
        slot_mapping=table[:, 0].long() * block_size,
    )
    return [functools.partial(write_kv_cache, *new, keys, values, metadata, kernel=kernel)]
