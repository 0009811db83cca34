"""Two devices, shared in every way that vLLM knows: each rank computes its part of the same logits."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.emulated.rounds import (
    EAGER,
    FULL,
    LENGTHS,
    PIECEWISE,
    THREE_IN_A_BUCKET_OF_FOUR,
    WORKSPACE,
    right,
    turn,
)

PARALLEL: dict[str, dict[str, Any]] = {
    "TP=2": {"tensor_parallel_size": 2},
    "TP=2, experts in parallel": {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    "PP=2": {"pipeline_parallel_size": 2},
    "DP=2": {"data_parallel_size": 2},
    "DP=2, experts in parallel": {"data_parallel_size": 2, "enable_expert_parallel": True},
}


MODES: dict[str, dict[str, dict[str, Any]]] = {
    "8.3": {
        "eager": {"options": EAGER},
        "piecewise": {},
        "full decode graphs": {"options": FULL, "machine": WORKSPACE},
    },
    "9.1": {"eager": {"options": EAGER}, "piecewise": {"options": PIECEWISE}, "full decode graphs": {}},
}


# why their decode steps are captured piecewise instead, on vllm-ascend 0.11
DIVERGING = "lets one rank of data parallelism replay decodes while another computes a prompt"
NOT_CAPTURED = {
    "PP=2": "captures no stage of a pipeline as a whole",
    "DP=2": DIVERGING,
    "DP=2, experts in parallel": DIVERGING,
}
# in `make test`: each layout once
SHORT = {
    ("8.3", "eager"): ("TP=2",),
    ("8.3", "full decode graphs"): ("TP=2, experts in parallel", "PP=2", "DP=2, experts in parallel"),
    ("9.1", "full decode graphs"): ("TP=2, experts in parallel",),
}


@pytest.mark.parametrize(
    ("cann", "mode", "how"),
    # layouts without whole graphs are captured piecewise: once is enough
    [
        pytest.param(cann, mode, how, marks=[pytest.mark.long] * (how not in SHORT.get((cann, mode), ())))
        for cann in MODES
        for mode in MODES[cann]
        for how in PARALLEL
        if (cann, mode) != ("8.3", "piecewise") or how not in NOT_CAPTURED
    ],
)
def test_two_devices_equal_transformers_in_float32(cann, mode, how, serve_on, expected):
    """Collectives are part of the graphs, and each rank updates its own attention. The first request is alone, on one
    rank of two where requests are shared out, and its prompt as long as a decode step may be. The canary compares whole
    graphs on all ranks together."""
    rounds = [turn((5,), seed=3), turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    asked = MODES[cann][mode] | {"canary": "full" in mode}
    results, printed = serve_on(cann)(rounds, **{**asked, "options": {**asked.get("options", {}), **PARALLEL[how]}})
    assert right(rounds, results, expected) == [True, True, True]
    why = NOT_CAPTURED.get(how, "") if cann == "8.3" else ""
    captured = "full" in mode and not why
    assert ("decode, FULL" in printed) == captured
    assert ("FULL_DECODE_ONLY does not work here" in printed) == ("full" in mode and not captured)
    assert "full" not in mode or why in printed


@pytest.mark.parametrize(
    "how", ["TP=2, experts in parallel", pytest.param("DP=2, experts in parallel", marks=pytest.mark.long)]
)
def test_tokens_sent_all_to_all_equal_transformers_in_float32(how, serve, expected):
    rounds = [turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, _ = serve(rounds, options={**EAGER, **PARALLEL[how]}, spoil="by_all_to_all")
    assert right(rounds, results, expected) == [True, True]


@pytest.mark.long
def test_a_rank_that_fails_alone_ends_the_engine_at_once(serve_9_1):
    """vLLM waits five minutes for the first rank, and then does not know why."""
    results, printed = serve_9_1([turn((5,))], options={**EAGER, **PARALLEL["TP=2"]}, spoil="second_rank_fails")
    assert isinstance(results[0], str)
    assert "507015: the second card" in printed
    assert "timed out" not in results[0] + printed
