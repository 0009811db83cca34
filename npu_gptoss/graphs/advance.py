"""A decode step's end, on the device: the chosen tokens become the next step's inputs.

    tokens    = chosen where finite, -1 elsewhere
    input_ids = max(tokens, 0);   positions += 1;   seq_lens += 1;   slots = where the next key goes

for the rows in use (slot >= 0); padding rows stay as they are. So the next step can be launched before the host has
seen this one's tokens.
"""

from __future__ import annotations

import torch

from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.kernels import (
    Capability,
    Priority,
    accepts,
    define_operation,
    register_kernel,
    select_kernel,
    signature,
)

ADVANCE = define_operation(
    "graphs",
    "advance",
    roles=("table",),
    traits=(),
    summary="the chosen tokens become the inputs of the next decode step",
)


def advance(state: DecodeState, chosen: torch.Tensor, finite: torch.Tensor, *, kernel: str | None = None) -> None:
    """Moves `state` one token on, in place. chosen [rows] int64, finite [rows] bool, for the rows of `state`."""
    run = select_kernel(ADVANCE, signature(table=state.block_table.dtype), {}, override=kernel)
    run(state=state, chosen=chosen, finite=finite)


@register_kernel(
    ADVANCE.family,
    ADVANCE.mode,
    solution="small_ops",
    signatures=(accepts(table="int32"),),
    traits={},
    priority=Priority.PORTABLE,
)
def advance_small_ops(state: DecodeState, chosen: torch.Tensor, finite: torch.Tensor) -> None:
    """Plain torch ops."""
    used = state.slots >= 0
    state.tokens.copy_(torch.where(finite, chosen, -1))
    state.input_ids.copy_(torch.where(used, state.tokens.clamp(min=0), state.input_ids))
    state.positions.add_(used)
    state.seq_lens.add_(used)
    # a request that ends here may own no further block: its next step is thrown away, but must not reach beyond
    column = (state.positions // state.block_size).clamp(max=state.block_table.shape[1] - 1)
    block = state.block_table.gather(1, column[:, None]).squeeze(1).to(torch.int64)
    slot = block * state.block_size + state.positions % state.block_size
    state.slots.copy_(torch.where(used, slot, state.slots))


@register_kernel(
    ADVANCE.family,
    ADVANCE.mode,
    solution="triton",
    capability=Capability.of("cuda", features=("triton",)),
    signatures=(accepts(table="int32"),),
    traits={},
    priority=Priority.PERFORMANT,
)
def advance_triton(state: DecodeState, chosen: torch.Tensor, finite: torch.Tensor) -> None:
    """One launch."""
    from npu_gptoss.graphs.advance_triton import launch

    launch(state, chosen, finite)
