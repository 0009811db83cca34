from __future__ import annotations

import pytest

from npu_gptoss.graphs.buckets import bucket_for, capture_sizes, checked_sizes
from tests.refused import refused


@pytest.mark.parametrize(
    ("requests", "sizes"),
    [
        *((1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (10, [1, 2, 4, 8, 10])),
        *((16, [1, 2, 4, 8, 16]), (17, [1, 2, 4, 8, 16, 17]), (24, [1, 2, 4, 8, 16, 24])),
    ],
)
def test_no_size_is_captured_that_no_step_can_have(requests: int, sizes: list[int]) -> None:
    assert capture_sizes(requests) == sizes


@pytest.mark.parametrize(("rows", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, None)])
def test_a_step_takes_the_smallest_graph_that_holds_it(rows: int, bucket: int | None) -> None:
    assert bucket_for(rows, (1, 2, 4, 8)) == bucket


def test_chosen_sizes_are_put_in_order_once_each() -> None:
    assert checked_sizes([8, 1, 4, 4]) == (1, 4, 8)


@pytest.mark.parametrize("sizes", [[], [0, 1], [-4]])
def test_sizes_that_are_none_are_refused(sizes: list[int]) -> None:
    with refused("capture_sizes"):
        checked_sizes(sizes)


def test_graphs_for_no_request_are_refused() -> None:
    with refused("max_requests"):
        capture_sizes(0)
