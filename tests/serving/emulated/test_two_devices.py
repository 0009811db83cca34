"""Two devices, shared in every way that vLLM knows: each rank computes its part of the same logits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.emulated.rounds import FULL, LENGTHS, THREE_IN_A_BUCKET_OF_FOUR, WORKSPACE, right, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

PARALLEL: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2, experts in parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "PP=2": {"pipeline_parallel_size": 2},
    "DP=2": {"data_parallel_size": 2},
    "DP=2, experts in parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


@pytest.mark.parametrize("how", PARALLEL)
def test_two_devices_equal_transformers_in_float32(how, serve, expected):
    """Piecewise graphs, whose prefills beyond the largest size run without."""
    rounds = [turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, _ = serve(rounds, options=PARALLEL[how])
    assert right(rounds, results, expected) == [True, True]


def test_full_decode_graphs_on_two_devices_equal_transformers_in_float32(serve, expected):
    """Collectives are part of the graph, and each rank updates its own attention."""
    rounds = [turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, printed = serve(rounds, options={**PARALLEL["TP=2"], **FULL}, machine=WORKSPACE)
    assert "decode, FULL" in printed
    assert right(rounds, results, expected) == [True, True]
