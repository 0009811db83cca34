"""`advance` as one small Triton kernel. It waits for its inputs like every kernel of a decode step (PDL)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.kernels.triton_launch import launch_options, let_next_start, wait_for_inputs


@triton.jit
def advance_kernel(
    input_ids,  # [rows] int64, like positions and slots
    positions,
    slots,
    seq_lens,  # [rows] int32
    block_table,  # [rows, blocks] int32, rows `stride` apart
    tokens,  # [rows] int64
    chosen,  # [rows] int64
    finite,  # [rows] bool as bytes
    rows,
    blocks,
    stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    token = tl.load(chosen + row, mask=inside, other=0)
    token = tl.where(tl.load(finite + row, mask=inside, other=0) != 0, token, -1)
    tl.store(tokens + row, token, mask=inside)
    used = inside & (tl.load(slots + row, mask=inside, other=-1) >= 0)
    position = tl.load(positions + row, mask=used, other=0) + 1
    column = tl.minimum(position // BLOCK_SIZE, blocks - 1)
    block = tl.load(block_table + row.to(tl.int64) * stride + column, mask=used, other=0).to(tl.int64)
    tl.store(input_ids + row, tl.maximum(token, 0), mask=used)
    tl.store(positions + row, position, mask=used)
    tl.store(seq_lens + row, tl.load(seq_lens + row, mask=used, other=0) + 1, mask=used)
    tl.store(slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=used)


def launch(state: DecodeState, chosen: torch.Tensor, finite: torch.Tensor) -> None:
    """As `advance`."""
    rows = state.capacity
    block = min(triton.next_power_of_2(rows), 128)
    advance_kernel[(triton.cdiv(rows, block),)](
        state.input_ids,
        state.positions,
        state.slots,
        state.seq_lens,
        state.block_table,
        state.tokens,
        chosen,
        finite.view(torch.uint8),
        rows,
        state.block_table.shape[1],
        state.block_table.stride(0),
        BLOCK_SIZE=state.block_size,
        BLOCK=block,
        **launch_options(state.ints, 1),
    )
