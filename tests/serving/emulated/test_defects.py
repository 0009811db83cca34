"""Known defects of CANN, computed by the emulated 910B, get a workaround or end the start; and failing updates."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import FULL, THREE_IN_A_BUCKET_OF_FOUR, right, turn

ABOVE_A_TILE = (700, 520)
WAY_ROUND = "keeps heads apart"
EXPERTS_IN_PARALLEL = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


@pytest.mark.parametrize("options", [{}, FULL], ids=["piecewise", "full decode graphs"])
def test_heads_that_are_merged_wrongly_are_kept_apart(options, serve, expected):
    rounds = [turn(ABOVE_A_TILE, seed=3)]
    results, printed = serve(rounds, options=options, machine={"defects": ["merged-heads"]})
    assert printed.count(WAY_ROUND) == 1
    assert "CANN 8.3.RC1" in printed
    assert "never tested whole" in printed
    assert right(rounds, results, expected) == [True]
    assert ("FULL_DECODE_ONLY does not work here" in printed) is bool(options), "no workaround in a graph"


@pytest.mark.parametrize(
    ("defect", "options", "what"),
    [
        ("hidden-first-tile", {}, "attention computes"),
        ("stale-counts", EXPERTS_IN_PARALLEL, "experts compute"),
        # whose calls tests/verify/self_test makes without a server
        pytest.param("window-race", {}, "attention computes", marks=pytest.mark.long),
        pytest.param("narrow-norm", {}, "projections or norms compute", marks=pytest.mark.long),
        pytest.param("few-rows", {}, "projections or norms compute", marks=pytest.mark.long),
    ],
)
def test_a_card_that_computes_wrongly_is_refused_before_the_first_request(defect, options, what, serve):
    with pytest.raises(AssertionError, match=f"{what} wrong results on this card"):
        serve([turn(THREE_IN_A_BUCKET_OF_FOUR)], options=options, machine={"defects": [defect]})


def test_a_defect_of_expert_parallelism_stops_no_single_rank(serve, expected):
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR)]
    results, _ = serve(rounds, machine={"defects": ["stale-counts"]})
    assert right(rounds, results, expected) == [True]


@pytest.mark.parametrize(
    ("defect", "lengths"),
    [
        ("merged-heads", ABOVE_A_TILE),
        pytest.param("narrow-norm", THREE_IN_A_BUCKET_OF_FOUR, marks=pytest.mark.long),
        pytest.param("few-rows", THREE_IN_A_BUCKET_OF_FOUR, marks=pytest.mark.long),
    ],
)
def test_these_defects_give_wrong_text_without_the_check(defect, lengths, serve, expected):
    """Counts of the call before end the emulated engine instead: unwritten memory is NaN here, and reaches a router."""
    rounds = [turn(lengths, seed=3)]
    results, printed = serve(rounds, machine={"defects": [defect]}, spoil="not_checked_at_start")
    assert WAY_ROUND not in printed
    assert right(rounds, results, expected) == [False]


def test_a_driver_that_refuses_updates_is_served_piecewise(serve, expected):
    """A probe that replays first leaves a graph that waits for ever, and PIECEWISE starts on a dead card."""
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR)]
    results, printed = serve(rounds, options=FULL, spoil="updates_refused")
    assert printed.count("FULL_DECODE_ONLY does not work here (a full layer: 207000") == 1
    assert right(rounds, results, expected) == [True]


@pytest.mark.parametrize(
    "spoil", [pytest.param("updates_refused", marks=pytest.mark.long), "update_of_the_second_layer_refused"]
)
def test_an_update_that_fails_in_service_is_no_deadlock(spoil, serve, expected):
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR), turn(THREE_IN_A_BUCKET_OF_FOUR, spoil=spoil)]
    results, printed = serve(rounds, options=FULL)
    assert right(rounds[:1], results[:1], expected) == [True]
    assert "decode, FULL" in printed, "graphs bring their own workspace where CANN refuses to tell"
    assert WAY_ROUND not in printed
    assert "207000" in results[1]
    assert "deadlock" not in printed
