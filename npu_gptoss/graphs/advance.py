"""A decode step's beginning, on the device: the cursor becomes the step's inputs, and moves on.

For the rows in use (cursor position >= 0):

    input_ids = max(token, 0);   positions = position;   seq_lens = position + 1;   slots = the block table's
    position += 1

Padding rows get token 0, position 0, no keys and the spare slot. A token of -1 (the logits that chose it were not
finite) is computed as 0: the host will throw the step away, but it must stay within the vocabulary.
"""

from __future__ import annotations

import torch

from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.kernels import TRITON, Priority, accepts, define_operation, register_kernel, select_kernel, signature

ADVANCE = define_operation(
    "graphs", "advance", roles=("table",), summary="the cursor becomes the inputs of a decode step, and moves on"
)


def advance(state: DecodeState, *, kernel: str | None = None) -> None:
    """Fills the inputs of `state` from its cursor and moves that by one, in place."""
    run = select_kernel(ADVANCE, signature(table=state.block_table.dtype), {}, override=kernel)
    run(state=state)


@register_kernel(ADVANCE, solution="reference", signatures=(accepts(table="int32"),), priority=Priority.REFERENCE)
def advance_reference(state: DecodeState) -> None:
    """The definition, row by row on the host."""
    table = state.block_table.tolist()
    for row, (token, position) in enumerate(zip(state.tokens.tolist(), state.next_positions.tolist(), strict=True)):
        used = position >= 0
        block = table[row][min(position // state.block_size, len(table[row]) - 1)]
        slot = block * state.block_size + position % state.block_size
        inputs = (max(token, 0), position, slot) if used else (0, 0, state.spare_slot)
        state.ints[:, row] = torch.tensor(inputs)
        state.seq_lens[row] = position + 1 if used else 0
        state.next_positions[row] = position + 1 if used else position


@register_kernel(ADVANCE, solution="small_ops", signatures=(accepts(table="int32"),), priority=Priority.PORTABLE)
def advance_small_ops(state: DecodeState) -> None:
    """Plain torch ops."""
    used = state.next_positions >= 0
    position = state.next_positions.clamp(min=0)
    # what is launched behind a request's last token owns no further block: it must not reach beyond the table
    column = (position // state.block_size).clamp(max=state.block_table.shape[1] - 1)
    block = state.block_table.gather(1, column[:, None]).squeeze(1).to(torch.int64)
    slot = block * state.block_size + position % state.block_size
    state.input_ids.copy_(state.tokens.clamp(min=0) * used)
    state.positions.copy_(position)
    state.slots.copy_(torch.where(used, slot, state.spare_slot))
    state.seq_lens.copy_((position + 1) * used)
    state.next_positions.add_(used)


register_kernel(
    ADVANCE,
    solution="triton",
    capability=TRITON,
    signatures=(accepts(table="int32"),),
    priority=Priority.PERFORMANT,
    function="npu_gptoss.graphs.advance_triton:launch",
    summary="One launch.",
)
