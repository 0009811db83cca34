"""Launches for prompts: keys gathered into contiguous memory, then the causal loop, in Triton or, for Hopper, Gluon."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_gptoss.attention.triton.gather import gather_kernel
from npu_gptoss.attention.triton.launch_decode import LOG2_E
from npu_gptoss.attention.triton.plan import Prompts
from npu_gptoss.attention.triton.prefill import prefill_kernel
from npu_gptoss.attention.window import keys_before
from npu_gptoss.kernels.triton_launch import INTERPRETED, launch_options

GATHER_KEYS = 64


@dataclass(frozen=True)
class Tiling:
    """rows: of a tile, positions times query heads of a key head; keys: of a step. hopper: for the Gluon kernel."""

    rows: int
    keys: int
    warps: int
    stages: int
    hopper: bool = False

    def positions(self, group: int) -> int:
        """Of a tile, with `group` query heads (a power of two) to a key head."""
        return max(self.rows // group, 1)


# Best of a grid on an H200 with gpt-oss's heads.
FULL = Tiling(rows=64, keys=128, warps=4, stages=2)
WINDOW = Tiling(rows=64, keys=32, warps=4, stages=3)
WIDE = Tiling(rows=32, keys=32, warps=4, stages=1)
HOPPER = Tiling(rows=192, keys=128, warps=4, stages=2, hopper=True)


def tiling_for(dtype: torch.dtype, sliding_window: int | None) -> Tiling:
    """Of the Triton kernel."""
    if dtype == torch.float32:
        return WIDE
    return FULL if sliding_window is None else WINDOW


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
    tiling: Tiling,
) -> None:
    """One round of prompts."""
    page, kv_heads, dim = key_cache.shape[1:]
    heads = query.shape[1] // kv_heads
    group = triton.next_power_of_2(heads)
    gathered = torch.empty(2, kv_heads * prompts.keys, dim, dtype=key_cache.dtype, device=query.device)
    block = min(GATHER_KEYS, tiling.keys)
    gather_kernel[(kv_heads, triton.cdiv(prompts.longest, block), prompts.requests.shape[0])](
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
        TILE_KEYS=tiling.keys,
        BLOCK=block,
        **launch_options(query, 4),
    )
    before = keys_before(sliding_window)
    attend = _hopper if tiling.hopper else _plain
    attend(query, gathered, sinks, out, prompts, scale * LOG2_E, -1 if before is None else before, heads, group, tiling)


def _plain(
    query: torch.Tensor,
    gathered: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    prompts: Prompts,
    scale: float,
    before: int,
    heads: int,
    group: int,
    tiling: Tiling,
) -> None:
    dim, kv_heads = query.shape[2], query.shape[1] // heads
    keys, values = (TensorDescriptor.from_tensor(part, [tiling.keys, dim]) for part in gathered)
    prefill_kernel[(prompts.tiles.shape[0] * kv_heads,)](
        query,
        keys,
        values,
        sinks,
        out,
        prompts.requests,
        prompts.tiles,
        scale,
        prompts.keys,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BEFORE=before,
        BLOCK_Q=tiling.positions(group),
        BLOCK_N=tiling.keys,
        WIDE=INTERPRETED or query.dtype == torch.float32,
        num_stages=tiling.stages,
        **launch_options(query, tiling.warps),
    )


def _hopper(
    query: torch.Tensor,
    gathered: torch.Tensor,
    sinks: torch.Tensor,
    out: torch.Tensor,
    prompts: Prompts,
    scale: float,
    before: int,
    heads: int,
    group: int,
    tiling: Tiling,
) -> None:
    from npu_gptoss.attention.triton import hopper

    dim, kv_heads = query.shape[2], query.shape[1] // heads
    keys, values = (hopper.descriptor(part, tiling.keys) for part in gathered)
    units = prompts.tiles.shape[0] * kv_heads
    hopper.prefill_kernel[(min(units, multiprocessors(query.device.index)),)](
        query,
        keys,
        values,
        sinks,
        out,
        prompts.requests,
        prompts.tiles,
        units,
        prompts.keys,
        scale,
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        HEADS=heads,
        GROUP=group,
        KV_HEADS=kv_heads,
        DIM=dim,
        BEFORE=before,
        BLOCK_N=tiling.keys,
        STAGES=tiling.stages,
        num_warps=tiling.warps,
    )


@functools.cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
