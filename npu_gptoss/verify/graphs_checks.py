"""The beginning of a decode step on the device: exact integers, where a wrong one reads another request's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_gptoss.graphs.advance import ADVANCE, advance
from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.verify.calls import Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs
from npu_gptoss.verify.compare import Outputs

FIELDS = ("input_ids", "positions", "slots", "seq_lens", "next_positions")


def _state(tokens: list[int], positions: list[int], capacity: int, block_size: int, seed: int) -> DecodeState:
    """A request a row, each with separate blocks up to the one after its position; then padding rows."""
    blocks = max(positions) // block_size + 2
    state = DecodeState.allocate(capacity, blocks, block_size, spare_slot=10**6, device=torch.device("cpu"))
    numbers = torch.randperm(capacity * blocks, generator=torch.Generator().manual_seed(seed)) + 1
    state.block_table.copy_(numbers.view(capacity, blocks))
    state.cursor[0, : len(tokens)] = torch.tensor(tokens)
    state.cursor[1, : len(tokens)] = torch.tensor(positions)
    state.ints.fill_(-5)  # left by an earlier step
    return state


def advance_calls(spec: CallSpec) -> Iterator[Call]:
    """The edges of a block, padding rows, a token that was not finite; then random cursors of one to 300 rows."""
    plans = [
        ("edges of a block", [10, 11, 12, 13], [0, 15, 16, 31], 6, 16),
        ("one row", [7], [40], 1, 16),
        ("a token that was not finite", [-1, 7], [2, 2], 2, 4),
    ]
    for name, draw in spec.fuzz("advance"):
        rows, size = draw.randint(1, 300), draw.choice((4, 16, 128))
        tokens = [draw.randint(-1, 200000) for _ in range(rows)]
        positions = [draw.randint(0, 9 * size) for _ in range(rows)]
        plans.append((name, tokens, positions, rows + draw.randint(0, 9), size))
    for number, (name, *plan) in enumerate(plans):
        yield Call(name, {"state": _state(*plan, seed=number)})


def run_advance(inputs: Inputs, kernel: str | None) -> Outputs:
    """Twice: the second step's inputs follow from where the first one left the cursor."""
    state, outputs = inputs["state"], {}
    for step in ("first", "second"):
        advance(state, kernel=kernel)
        outputs |= {f"{step} {name}": getattr(state, name).clone().to(torch.int64) for name in FIELDS}
    return outputs


_EXACT = {f"{step} {name}": "exact" for step in ("first", "second") for name in FIELDS}
CHECKS = (Check(ADVANCE, advance_calls, run_advance, {"table": ("int32",)}, _EXACT),)
