"""Negative controls: the answers of an engine show each mistake of `spoils.py`, or an operator refuses it."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import EAGER, SPOILT, THREE_IN_A_BUCKET_OF_FOUR, right, turn


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


def test_interleaved_weights_are_refused_at_the_start(serve):
    with pytest.raises(AssertionError, match="experts compute wrong results"):
        serve([turn(SPOILT)], options=EAGER, spoil="interleaved_weights")
