"""Negative controls: the answers of an engine show each mistake of `spoils.py`, or an operator refuses it."""

from __future__ import annotations

import re

import pytest

from tests.serving.emulated.rounds import (
    EAGER,
    FULL,
    SPOILT,
    THREE_IN_A_BUCKET_OF_FOUR,
    TOLERANCE,
    WORKSPACE,
    errors,
    right,
    turn,
    worst,
)

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


def test_dropped_and_late_updates_and_dropped_replays_are_seen(serve, expected):
    spoils = ["updates_dropped", "updates_late", "replay_dropped"]
    rounds = [turn(SPOILT)]
    for seed, spoil in enumerate(spoils, 3):
        rounds += [turn(SPOILT, seed=seed, spoil=spoil), turn(SPOILT, seed=seed + 10)]
    results, _ = serve(rounds, options=FULL, machine=WORKSPACE)
    seen = [worst(of_round) > 100 * TOLERANCE for of_round in errors(rounds, results, expected)]
    # a replay that did not take place leaves its events behind, which let every later one run too early
    assert seen == [False, True, False, True, False, True, True]


def test_a_block_table_that_was_rebound_is_seen(serve, expected):
    rounds = [turn(SPOILT)]
    results, _ = serve(rounds, options=FULL, machine=WORKSPACE, spoil="block_table_rebound")
    assert worst(errors(rounds, results, expected)[0]) > 100 * TOLERANCE


def test_a_tail_that_is_not_zeroed_is_refused_by_the_router(serve, expected):
    """Three requests in a graph of four: old memory in the fourth row reaches the router; NaN has no order."""
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2, spoil="tail_not_zeroed")]
    results, _ = serve(rounds)
    assert right(rounds[:1], results[:1], expected) == [True]
    assert "[R57]" in results[1]
    assert "NaN" in results[1]


def test_biases_that_are_spread_over_the_rows_cannot_be_captured(serve, expected):
    """The fourth problem of the Ascend article: right in eager mode, and the capture ends the start."""
    rounds = [turn(SPOILT)]
    results, _ = serve(rounds, options=EAGER, spoil="biases_spread")
    assert right(rounds, results, expected) == [True]
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve(rounds, spoil="biases_spread")
    assert "repeat_interleave(counts)" in str(ending.value)
    assert "error code is 107027" in str(ending.value)


def test_rows_that_are_not_cut_are_refused_when_a_graph_is_replayed(serve, expected):
    """The fifth problem of the Ascend article: three requests replay the graph of four."""
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2, spoil="rows_not_cut")]
    results, printed = serve(rounds)
    assert right(rounds[:1], results[:1], expected) == [True]
    assert "error code is 561002" in results[1]
    assert "queryT(4)" in results[1]
    assert "[R15]" in results[1]
    assert "mixed prefill-decode, PIECEWISE" in printed


def test_a_wrong_window_and_lost_sinks_are_seen_and_short_lists_refused(serve, expected):
    rounds = [
        turn(SPOILT, seed=3, spoil="window_of_129"),
        turn(SPOILT, seed=4, spoil="sinks_dropped"),
        turn(SPOILT, seed=5),
        turn(SPOILT, seed=6, spoil="upstream_lists"),
    ]
    results, _ = serve(rounds, options=EAGER)
    seen = [worst(of_round) > 10 * TOLERANCE for of_round in errors(rounds[:3], results[:3], expected)]
    assert seen == [True, True, False]
    assert "[R15]" in results[3] or "[R13]" in results[3]


def test_interleaved_weights_are_refused_at_the_start(serve, expected):
    rounds = [turn(SPOILT)]
    with pytest.raises(AssertionError, match="nothing was served") as ending:
        serve(rounds, options=EAGER, spoil="interleaved_weights")
    assert "experts compute wrong results" in str(ending.value)
    results, _ = serve(rounds, options=EAGER, spoil="interleaved_weights_unchecked")
    assert worst(errors(rounds, results, expected)[0]) > 1000 * TOLERANCE


def test_biases_in_bf16_are_refused(serve):
    rounds = [turn(SPOILT, spoil="biases_in_bf16")]
    results, _ = serve(rounds, options={**EAGER, "dtype": "bfloat16"})
    assert "[R47]" in results[0]


def test_a_copy_that_no_card_reports_is_warned_of(serve, expected):
    rounds = [turn(SPOILT, spoil="query_strided")]
    results, printed = serve(rounds, options=EAGER)
    assert right(rounds, results, expected) == [True]
    assert re.findall(r"Warning: .*query .* is copied whole in every call.*\[R35\]", printed)
