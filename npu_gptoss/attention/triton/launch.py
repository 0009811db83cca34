"""From a call of `paged_attention` to launches: which configuration, how many splits, which memory."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_gptoss.attention.metadata import DecodeMetadata, StepMetadata
from npu_gptoss.attention.triton.decode import decode_kernel
from npu_gptoss.attention.triton.gather import gather_kernel
from npu_gptoss.attention.triton.plan import Plan, Prompts, Rows, make_plan
from npu_gptoss.attention.triton.prefill import prefill_kernel
from npu_gptoss.attention.window import keys_before
from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_launch import INTERPRETED, launch_options

LOG2_E = 1 / math.log(2)
GATHER_KEYS = 64
MOST_SPLITS = 32


@dataclass(frozen=True)
class PrefillConfig:
    """rows: of a tile, positions times query heads of a key head; keys: of a tile."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class DecodeConfig:
    """keys: of one step of a program; programs: aimed at in all, of which the splits follow."""

    keys: int
    warps: int
    stages: int
    programs: int


PREFILL = PrefillConfig(rows=64, keys=128, warps=4, stages=2)
PREFILL_WINDOW = PrefillConfig(rows=64, keys=32, warps=4, stages=3)
PREFILL_WIDE = PrefillConfig(rows=32, keys=32, warps=4, stages=1)
DECODE = DecodeConfig(keys=128, warps=4, stages=3, programs=512)
DECODE_WINDOW = DecodeConfig(keys=128, warps=4, stages=1, programs=1)
DECODE_WIDE = DecodeConfig(keys=32, warps=4, stages=1, programs=512)


def prefill_config(dtype: torch.dtype, window: bool) -> PrefillConfig:
    if dtype == torch.float32:
        return PREFILL_WIDE
    return PREFILL_WINDOW if window else PREFILL


def decode_config(dtype: torch.dtype, window: bool) -> DecodeConfig:
    if dtype == torch.float32:
        return DECODE_WIDE
    return DECODE_WINDOW if window else DECODE


def run(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """As `paged_attention` of the family."""
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not cache.is_contiguous():
            raise InputError(
                f"{name} must be contiguous [blocks, block_size, kv_heads, head_dim], got strides {cache.stride()}"
            )
    if out.stride(-1) != 1:
        raise InputError(f"out must be contiguous in its last dimension, got strides {out.stride()}")
    if scale <= 0:
        raise InputError(f"scale must be positive, got {scale}")
    query = query if query.stride(-1) == 1 else query.contiguous()
    group = triton.next_power_of_2(query.shape[1] // key_cache.shape[2])
    config = prefill_config(query.dtype, sliding_window is not None)
    plan = _plan(metadata, sliding_window, max(config.rows // group, 1), config.keys, query.device)
    call = (query, key_cache, value_cache, metadata.block_table, sinks.contiguous(), scale, sliding_window, out)
    if plan.decode is not None:
        decode(*call, plan.decode)
    for prompts in plan.rounds:
        prefill(*call, prompts, config)


def _plan(
    metadata: StepMetadata, sliding_window: int | None, tile_rows: int, tile_keys: int, device: torch.device
) -> Plan:
    if isinstance(metadata, DecodeMetadata):
        return Plan(Rows(metadata.num_requests, metadata.max_seq_len, metadata.lengths), ())
    # a step of decode looks the same to every layer
    key = ("attention.triton", *((sliding_window, tile_rows, tile_keys) if metadata.max_query_len > 1 else ()))
    plans = metadata.plans
    if key not in plans:
        plans[key] = make_plan(metadata, sliding_window, tile_rows, tile_keys, device)
    return plans[key]


def prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    prompts: Prompts,
    config: PrefillConfig,
) -> None:
    """One round of prompts."""
    page, kv_heads, dim = key_cache.shape[1:]
    heads = query.shape[1] // kv_heads
    group = triton.next_power_of_2(heads)
    gathered = torch.empty(2, kv_heads * prompts.keys, dim, dtype=key_cache.dtype, device=query.device)
    block = min(GATHER_KEYS, config.keys)
    gather_kernel[(triton.cdiv(prompts.longest, block), prompts.requests.shape[0], kv_heads)](
        key_cache,
        value_cache,
        block_table,
        prompts.requests,
        gathered[0],
        gathered[1],
        prompts.keys,
        block_table.stride(0),
        PAGE=page,
        KV_HEADS=kv_heads,
        DIM=dim,
        TILE_KEYS=config.keys,
        BLOCK=block,
        **launch_options(query, 4),
    )
    before = keys_before(sliding_window)
    tile = [config.keys, dim]
    prefill_kernel[(prompts.tiles.shape[0] * kv_heads,)](
        query,
        TensorDescriptor.from_tensor(gathered[0], tile),
        TensorDescriptor.from_tensor(gathered[1], tile),
        sinks,
        out,
        prompts.requests,
        prompts.tiles,
        scale * LOG2_E,
        prompts.keys,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BEFORE=-1 if before is None else before,
        BLOCK_Q=max(config.rows // group, 1),
        BLOCK_N=config.keys,
        WIDE=INTERPRETED or query.dtype == torch.float32,
        num_stages=config.stages,
        **launch_options(query, config.warps),
    )


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
    rows: Rows,
    config: DecodeConfig | None = None,
    splits: int | None = None,
) -> None:
    """The decode rows of a step. config and splits: to measure others than the chosen ones."""
    page, kv_heads, dim = key_cache.shape[1:]
    heads = query.shape[1] // kv_heads
    before = keys_before(sliding_window)
    config = config or decode_config(query.dtype, before is not None)
    longest = rows.longest if before is None else min(rows.longest, before + 1)
    if splits is None:
        splits = splits_for(rows.count, kv_heads, longest, config)
    if splits > 1:
        series = rows.count * kv_heads * splits
        sums = torch.empty(series * heads * dim, dtype=torch.float32, device=query.device)
        extremes = torch.empty(series * 2 * heads, dtype=torch.float32, device=query.device)
        arrived = _counters(query.device, rows.count * kv_heads)
    else:
        sums = extremes = arrived = query  # not touched
    nobody = rows.lengths
    decode_kernel[(kv_heads, splits, rows.count)](
        query,
        key_cache,
        value_cache,
        sinks,
        out,
        rows.lengths,
        block_table,
        nobody if rows.rows is None else rows.rows,
        nobody if rows.requests is None else rows.requests,
        sums,
        extremes,
        arrived,
        scale * LOG2_E,
        min(rows.longest, block_table.shape[1] * page),
        block_table.stride(0),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=triton.next_power_of_2(heads),
        ROWS=max(triton.next_power_of_2(heads), 16),
        KV_HEADS=kv_heads,
        DIM=dim,
        PAGE=page,
        BEFORE=-1 if before is None else before,
        BLOCK_N=config.keys,
        SPLITS=splits,
        MAPPED=rows.rows is not None,
        WIDE=INTERPRETED or query.dtype == torch.float32,
        num_stages=config.stages,
        **launch_options(query, config.warps),
    )


def splits_for(rows: int, kv_heads: int, longest: int, config: DecodeConfig) -> int:
    """Into how many shares the keys of a row are split at most; a row with fewer key tiles than that has a share each.

    A power of two that follows from the power of two above `rows`; `longest` only leaves out shares that no row could
    fill. So a graph captured for longer keys and padded rows splits as an eager step does, and computes the same bits.
    """
    wanted = max(config.programs // (triton.next_power_of_2(rows) * kv_heads), 1)
    wanted = min(1 << (wanted.bit_length() - 1), MOST_SPLITS)
    return min(wanted, triton.next_power_of_2(triton.cdiv(longest, config.keys)))


COUNTERS = 1 << 16


@functools.cache
def _counters_of(device: torch.device) -> torch.Tensor:
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def _counters(device: torch.device, count: int) -> torch.Tensor:
    """Zeros that every launch leaves zero again: so one allocation serves all, as long as they run in one stream."""
    if count > COUNTERS:
        return torch.zeros(count, dtype=torch.int32, device=device)
    return _counters_of(device)
