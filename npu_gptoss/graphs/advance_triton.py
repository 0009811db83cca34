"""`advance` as one small Triton kernel."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.graphs.state import DecodeState


@triton.jit
def advance_kernel(
    tokens,  # [rows] int64
    next_positions,  # [rows] int64, moved on
    block_table,  # [rows, blocks] int32, rows `stride` apart
    input_ids,  # [rows] int64, written; like positions and slots
    positions, slots,
    seq_lens,  # [rows] int32, written
    rows, blocks, stride, spare_slot,
    BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    upcoming = tl.load(next_positions + row, mask=inside, other=-1)
    used = upcoming >= 0
    position = tl.maximum(upcoming, 0)
    token = tl.load(tokens + row, mask=used, other=0)
    column = tl.minimum(position // BLOCK_SIZE, blocks - 1)
    block = tl.load(block_table + row.to(tl.int64) * stride + column, mask=used, other=0).to(tl.int64)
    tl.store(input_ids + row, tl.maximum(token, 0), mask=inside)
    tl.store(positions + row, position, mask=inside)
    tl.store(slots + row, tl.where(used, block * BLOCK_SIZE + position % BLOCK_SIZE, spare_slot), mask=inside)
    tl.store(seq_lens + row, tl.where(used, position + 1, 0).to(tl.int32), mask=inside)
    tl.store(next_positions + row, position + 1, mask=used)


def launch(state: DecodeState) -> None:
    """The Triton form of `advance`. Launched without PDL: the next kernel may read positions and slots before it
    waits."""
    rows = state.capacity
    block = min(triton.next_power_of_2(rows), 128)
    inputs = (state.input_ids, state.positions, state.slots, state.seq_lens)
    blocks, stride = state.block_table.shape[1], state.block_table.stride(0)
    advance_kernel[(triton.cdiv(rows, block),)](
        *(state.tokens, state.next_positions, state.block_table, *inputs, rows, blocks, stride, state.spare_slot),
        BLOCK_SIZE=state.block_size,
        BLOCK=block,
        num_warps=1,
    )
