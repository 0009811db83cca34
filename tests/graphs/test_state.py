"""The host's inputs of a decode step; test_advance.py tests the device's part."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.graphs.state import NOBODY, DecodeState
from tests.refused import refused

CPU = torch.device("cpu")
SPARE = 99 * 16 + 15


def fresh(capacity: int = 4) -> DecodeState:
    return DecodeState.allocate(capacity, 6, 16, SPARE, CPU)


def test_everybody_starts_as_padding() -> None:
    assert fresh().next_positions.tolist() == [NOBODY] * 4


def test_nothing_of_a_larger_step_stays_in_the_cursor_of_a_smaller_one() -> None:
    state = fresh()
    state.load([1, 2, 3, 4], [16, 17, 18, 19], [[1, 2], [3, 4], [5, 6], [7, 8]])
    state.load([9, 9, 8], [5, 5, 20], [[11], [12], [13, 14]])
    assert state.tokens.tolist() == [9, 9, 8, 0]
    assert state.next_positions.tolist() == [5, 5, 20, NOBODY]
    assert [row[:2] for row in state.block_table.tolist()[:3]] == [[11, 0], [12, 0], [13, 14]]


def test_a_request_that_grew_finds_its_new_block_in_its_own_row() -> None:
    state = fresh()
    state.load([1, 2], [15, 15], [[3], [4]])
    state.set_blocks([(0, 1, 8), (1, 1, 9)])
    assert [row[:2] for row in state.block_table.tolist()[:2]] == [[3, 8], [4, 9]]


def test_the_rows_of_a_bucket_are_views_that_every_load_reaches() -> None:
    state = fresh()
    bucket = state.rows(2)
    state.load([1, 2], [3, 4], [[5], [6]])
    assert bucket.tokens.tolist() == [1, 2]
    for name in ("cursor", "block_table", "ints", "seq_lens"):
        assert getattr(bucket, name).data_ptr() == getattr(state, name).data_ptr(), name
    shapes = {name: tuple(getattr(bucket, name).shape) for name in ("cursor", "block_table", "ints", "seq_lens")}
    assert shapes == {"cursor": (2, 2), "block_table": (2, 6), "ints": (3, 2), "seq_lens": (2,)}


@pytest.mark.parametrize(
    ("tokens", "positions", "tables"), [([1] * 5, [0] * 5, [[1]] * 5), ([1, 2], [0], [[1], [2]]), ([1], [0], [])]
)
def test_a_step_that_does_not_fit_is_refused(tokens: list, positions: list, tables: list) -> None:
    with refused("requests"):
        fresh().load(tokens, positions, tables)
