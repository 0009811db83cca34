"""The beginning of a decode step on the device: exact integers, where a wrong one reads another request's cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch

from npu_gptoss.graphs.advance import ADVANCE, advance
from npu_gptoss.graphs.state import NOBODY, DecodeState
from npu_gptoss.verify.calls import Call, Check, Inputs, Mistake, Outputs, Wanted, with_inputs

FIELDS = ("input_ids", "positions", "slots", "seq_lens", "next_positions")


def _state(tokens: list[int], positions: list[int], capacity: int, block_size: int, seed: int) -> DecodeState:
    """A request a row, each with blocks of its own up to the one behind its position; padding rows behind them."""
    blocks = max(positions) // block_size + 2
    state = DecodeState.allocate(capacity, blocks, block_size, spare_slot=10**6, device=torch.device("cpu"))
    numbers = torch.randperm(capacity * blocks, generator=torch.Generator().manual_seed(seed)) + 1
    state.block_table.copy_(numbers.view(capacity, blocks))
    state.cursor[0, : len(tokens)] = torch.tensor(tokens)
    state.cursor[1, : len(tokens)] = torch.tensor(positions)
    state.ints.fill_(-5)  # what an earlier step left there
    return state


def advance_calls(wanted: Wanted) -> Iterator[Call]:
    """The edges of a block, padding rows, a token that was not finite; then random cursors of one to 300 rows."""
    plans = [
        ("edges of a block", [10, 11, 12, 13], [0, 15, 16, 31], 6, 16),
        ("one row", [7], [40], 1, 16),
        ("a token that was not finite", [-1, 7], [2, 2], 2, 4),
    ]
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} advance")
        rows, size = draw.randint(1, 300), draw.choice((4, 16, 128))
        tokens = [draw.randint(-1, 200000) for _ in range(rows)]
        positions = [draw.randint(0, 9 * size) for _ in range(rows)]
        plans.append((f"fuzz {number} of seed {wanted.seed}", tokens, positions, rows + draw.randint(0, 9), size))
    for number, (name, *plan) in enumerate(plans):
        yield Call(name, {"state": _state(*plan, seed=number)})


def run_advance(inputs: Inputs, kernel: str) -> Outputs:
    """Twice: the second step's inputs follow from where the first one left the cursor."""
    state, outputs = inputs["state"], {}
    for step in ("first", "second"):
        advance(state, kernel=kernel)
        outputs |= {f"{step} {name}": getattr(state, name).clone().to(torch.int64) for name in FIELDS}
    return outputs


def define_advance(inputs: Inputs) -> Outputs:
    state = inputs["state"]
    own = DecodeState(
        state.cursor.clone(),
        state.block_table,
        state.ints.clone(),
        state.seq_lens.clone(),
        state.block_size,
        state.spare_slot,
    )
    return run_advance({"state": own}, "reference")


def _moved(change: Callable[[DecodeState], DecodeState | None]) -> Callable[[Inputs], DecodeState | None]:
    return lambda inputs: change(inputs["state"])


def _replaced(state: DecodeState, **fields: object) -> DecodeState:
    return DecodeState(**{**{n: getattr(state, n) for n in DecodeState.__dataclass_fields__}, **fields})


def _padding_used(state: DecodeState) -> DecodeState | None:
    cursor = state.cursor.clone()
    cursor[1] = cursor[1].clamp(min=0)
    return _replaced(state, cursor=cursor) if bool((state.cursor[1] == NOBODY).any()) else None


def _shifted(state: DecodeState) -> DecodeState:
    cursor = state.cursor.clone()
    cursor[1] += cursor[1] >= 0
    return _replaced(state, cursor=cursor)


MISTAKES = (
    with_inputs("position one too far", state=_moved(_shifted)),
    with_inputs("block table off by one", state=_moved(lambda s: _replaced(s, block_table=s.block_table.roll(1, 1)))),
    with_inputs("padding rows in use", state=_moved(_padding_used)),
    with_inputs("another spare slot", state=_moved(lambda s: _replaced(s, spare_slot=0) if _padding_used(s) else None)),
    Mistake("the cursor stays", lambda i, definition: _stays(definition(i))),
)


def _stays(right: Outputs) -> Outputs:
    return {name: right[name.replace("second", "first")] for name in right}


CHECKS = (
    Check(
        ADVANCE.name,
        ADVANCE.summary,
        advance_calls,
        run_advance,
        define_advance,
        MISTAKES,
        {"table": ("int32",)},
        precisions={f"{step} {name}": "exact" for step in ("first", "second") for name in FIELDS},
        operation=ADVANCE,
    ),
)
