"""Launches of the decode kernel: which configuration, how many splits, which memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from npu_gptoss.attention.triton.decode import decode_kernel
from npu_gptoss.attention.triton.plan import Rows
from npu_gptoss.kernels.tiles import tile
from npu_gptoss.kernels.triton_launch import INTERPRETED, arrivals, launch

MOST_SPLITS = 32
# Up to how many rows the first keys are loaded while the kernel before runs. One row leaves the memory idle then; eight
# do not, and miss the registers that this takes (on an H200: 2 us a layer faster; 7 us slower at 8192 keys).
SETTLED_ROWS = 1


@dataclass(frozen=True)
class DecodeConfig:
    """keys: of one step of a program; programs: aimed at in all, of which the splits follow."""

    keys: int
    warps: int
    stages: int
    programs: int


MANY_ROWS = 128  # from which on a window layer has smaller programs: more of them at a time
WIDE = DecodeConfig(keys=32, warps=4, stages=1, programs=512)


def decode_config(dtype: torch.dtype, window: bool, rows: int) -> DecodeConfig:
    if dtype == torch.float32:
        return WIDE
    many = "_many" if triton.next_power_of_2(rows) >= MANY_ROWS else ""
    return tile(f"attention.decode.window{many}" if window else "attention.decode.full", DecodeConfig)


def splits_for(rows: int, kv_heads: int, longest: int, config: DecodeConfig) -> int:
    """Into how many shares the keys of a row are split at most; a row with fewer key tiles than that has a share each.

    A power of two that follows from the power of two above `rows`; `longest` only leaves out shares that no row could
    fill. So a graph captured for longer keys and padded rows splits as an eager step does, and computes the same bits.
    """
    wanted = max(config.programs // (triton.next_power_of_2(rows) * kv_heads), 1)
    wanted = min(1 << (wanted.bit_length() - 1), MOST_SPLITS)
    return min(wanted, triton.next_power_of_2(triton.cdiv(longest, config.keys)))


@dataclass(frozen=True)
class Call:
    """The arguments of `paged_attention` as the kernels take them.

    stride: from one head of a cache to the next. scale: times log2 e. before: keys that a row sees before its own;
    negative: all.
    """

    query: torch.Tensor
    caches: tuple[torch.Tensor, torch.Tensor]
    stride: int
    block_table: torch.Tensor
    sinks: torch.Tensor
    scale: float
    before: int
    out: torch.Tensor

    @property
    def constants(self) -> dict[str, int]:
        kv_heads, dim = self.caches[0].shape[2:]
        heads = self.query.shape[1] // kv_heads
        group = triton.next_power_of_2(heads)
        return {"HEADS": heads, "GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "BEFORE": self.before}

    @property
    def strides(self) -> tuple[int, int, int, int]:
        """Strides of rows and heads: the query's, then the result's."""
        return (*self.query.stride()[:2], *self.out.stride()[:2])


def decode(call: Call, rows: Rows) -> None:
    """The decode rows of a step."""
    query, before, constants = call.query, call.before, call.constants
    page, kv_heads, dim = call.caches[0].shape[1:]
    packed = call.caches[0].dtype.itemsize == 1
    caches = [cache.view(torch.int32) for cache in call.caches] if packed else call.caches
    config = decode_config(query.dtype, before >= 0, rows.count)
    if packed:  # opens values for longer than it loads them: twice the programs, some 120 us for 163 at 32 x 8192
        config = replace(config, programs=2 * config.programs)
    longest = rows.longest if before < 0 else min(rows.longest, before + 1)
    splits = splits_for(rows.count, kv_heads, longest, config)
    if splits > 1:
        series = rows.count * kv_heads * splits
        sums = torch.empty(series * constants["HEADS"] * dim, dtype=torch.float32, device=query.device)
        extremes = torch.empty(series * 2 * constants["HEADS"], dtype=torch.float32, device=query.device)
        arrived = arrivals(rows.count * kv_heads, query.device)
    else:
        sums = extremes = arrived = query  # not touched
    mapped = (rows.lengths,) * 2 if rows.rows is None or rows.requests is None else (rows.rows, rows.requests)
    longest = min(rows.longest, call.block_table.shape[1] * page)
    launch(
        decode_kernel,
        (kv_heads, splits, rows.count),
        (
            *(query, *caches, call.sinks, call.out, rows.lengths, call.block_table, *mapped),
            *(sums, extremes, arrived, call.scale, longest, call.block_table.stride(0), *call.strides),
        ),
        warps=config.warps,
        ROWS=max(constants["GROUP"], 16),
        STRIDE=call.stride // 4 if packed else call.stride,
        PAGE=page,
        BLOCK_N=config.keys,
        SPLITS=splits,
        MAPPED=rows.rows is not None,
        SETTLED=rows.settled and rows.count <= SETTLED_ROWS,
        PACKED=packed,
        WIDE=INTERPRETED or query.dtype == torch.float32,
        num_stages=config.stages,
        **constants,
    )
