"""The beginning of a step on the device, for every kernel that can run here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu_gptoss.graphs.state import DecodeState
from npu_gptoss.kernels import load_kernels
from npu_gptoss.kernels.registry import registry
from tests.triton import TRITON_HERE

BLOCK_SIZE = 4
TABLES = [[3, 5, 1], [2, 4, 6], [7, 8, 9]]
SPARE = 99


Kernel = Callable[[DecodeState], None]


@pytest.fixture(params=["reference", "small_ops", pytest.param("triton", marks=TRITON_HERE)])
def kernel(request: pytest.FixtureRequest) -> Kernel:
    load_kernels()
    return registry.kernels[f"graphs.advance.{request.param}"].function


def loaded(tokens: list[int], positions: list[int]) -> DecodeState:
    state = DecodeState.allocate(5, 3, BLOCK_SIZE, SPARE, torch.device("cpu"))
    state.load(tokens, positions, TABLES[: len(tokens)])
    return state


def test_a_row_says_where_its_key_goes_and_how_far_it_sees(kernel: Kernel) -> None:
    """Position 4 is the first of the second block: an index by the token before would miss it."""
    state = loaded([10, 11, 12], [0, 4, 11])
    kernel(state)
    assert state.input_ids.tolist() == [10, 11, 12, 0, 0]
    assert state.positions.tolist() == [0, 4, 11, 0, 0]
    assert state.seq_lens.tolist() == [1, 5, 12, 0, 0]
    assert state.slots.tolist() == [3 * 4, 4 * 4, 9 * 4 + 3, SPARE, SPARE]


def test_the_next_step_takes_the_chosen_tokens_one_place_on(kernel: Kernel) -> None:
    state = loaded([10, 11, 12], [0, 3, 7])
    kernel(state)
    state.tokens.copy_(torch.tensor([20, 21, 22, 50, 51]))  # padding rows choose tokens too
    kernel(state)
    assert state.input_ids.tolist() == [20, 21, 22, 0, 0]
    assert state.positions.tolist() == [1, 4, 8, 0, 0]
    assert state.seq_lens.tolist() == [2, 5, 9, 0, 0]
    assert state.slots.tolist() == [3 * 4 + 1, 4 * 4, 9 * 4, SPARE, SPARE]


def test_a_block_given_between_two_steps_is_the_one_that_is_used(kernel: Kernel) -> None:
    state = loaded([10], [3])
    kernel(state)
    state.set_blocks([(0, 1, 42)])
    kernel(state)
    assert state.slots[0] == 42 * BLOCK_SIZE


def test_a_token_that_was_not_finite_is_computed_as_a_valid_one(kernel: Kernel) -> None:
    state = loaded([-1, 7], [2, 2])
    kernel(state)
    assert state.input_ids[:2].tolist() == [0, 7]


def test_the_step_behind_the_last_block_stays_inside_the_table(kernel: Kernel) -> None:
    state = loaded([10], [12])
    kernel(state)
    assert state.slots[0] // BLOCK_SIZE in TABLES[0]


def test_every_row_of_a_large_step_moves_on(kernel: Kernel) -> None:
    """A program of Triton's takes 128 rows; the rows behind them kept the tokens and slots of the step before."""
    rows = 130
    state = DecodeState.allocate(rows, 1, BLOCK_SIZE, SPARE, torch.device("cpu"))
    state.load(list(range(rows)), [1] * rows, [[row] for row in range(rows)])
    kernel(state)
    assert state.input_ids.tolist() == list(range(rows))
    assert state.slots.tolist() == [row * BLOCK_SIZE + 1 for row in range(rows)]
    assert state.next_positions.tolist() == [2] * rows
