"""Two devices, shared in every way that vLLM knows: each rank computes its part of the same logits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.emulated.rounds import EAGER, FULL, LENGTHS, THREE_IN_A_BUCKET_OF_FOUR, WORKSPACE, right, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

PARALLEL: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2, experts in parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "PP=2": {"pipeline_parallel_size": 2},
    "DP=2": {"data_parallel_size": 2},
    "DP=2, experts in parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


MODES: dict[str, dict[str, Any]] = {
    "eager": {"options": EAGER},
    "piecewise": {},
    "full decode graphs": {"options": FULL, "machine": WORKSPACE},
}


# why their decode steps are captured piecewise instead
DIVERGING = "lets one rank of data parallelism replay decodes while another computes a prompt"
NOT_CAPTURED = {
    "PP=2": "captures no stage of a pipeline as a whole",
    "DP=2": DIVERGING,
    "DP=2, experts in parallel": DIVERGING,
}
# of each mode in `make test`: each layout once
SHORT = {
    "eager": ("TP=2",),
    "piecewise": ("TP=2, experts in parallel",),
    "full decode graphs": ("TP=2, experts in parallel", "PP=2", "DP=2, experts in parallel"),
}


@pytest.mark.parametrize(
    ("mode", "how"),
    # layouts without whole graphs are captured piecewise: once is enough
    [
        pytest.param(mode, how, marks=[pytest.mark.long] * (how not in SHORT[mode]))
        for mode in MODES
        for how in PARALLEL
        if mode != "piecewise" or how not in NOT_CAPTURED
    ],
)
def test_two_devices_equal_transformers_in_float32(mode, how, serve, expected):
    """Collectives are part of the graphs, and each rank updates its own attention. The first request is alone, on one
    rank of two where requests are shared out, and its prompt as long as a decode step may be."""
    rounds = [turn((5,), seed=3), turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    asked = MODES[mode]
    results, printed = serve(rounds, **{**asked, "options": {**asked.get("options", {}), **PARALLEL[how]}})
    assert right(rounds, results, expected) == [True, True, True]
    captured = "full" in mode and how not in NOT_CAPTURED
    assert ("decode, FULL" in printed) == captured
    assert ("FULL_DECODE_ONLY does not work here" in printed) == ("full" in mode and not captured)
    assert "full" not in mode or NOT_CAPTURED.get(how, "") in printed


@pytest.mark.parametrize("how", [how for how in PARALLEL if "experts" in how])
def test_tokens_sent_all_to_all_equal_transformers_in_float32(how, serve, expected):
    rounds = [turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, _ = serve(rounds, options={**EAGER, **PARALLEL[how]}, spoil="by_all_to_all")
    assert right(rounds, results, expected) == [True, True]
