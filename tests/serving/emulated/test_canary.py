"""The canary of whole steps: silent on right graphs, and negative controls that it must see."""

from __future__ import annotations

import re

import pytest

from tests.serving.emulated.rounds import FULL, PIECEWISE, THREE_IN_A_BUCKET_OF_FOUR, WORKSPACE, right, turn

LOOK = {"look": True}
SERVED = [turn(THREE_IN_A_BUCKET_OF_FOUR, seed=3)]


def seen(results):
    return [sorted(found) for found in results]


def test_stale_lengths_and_written_padding_are_seen_and_nothing_else(serve_9_1, expected):
    spoils = ["updates_late", "updates_dropped", "padding_written"]
    rounds = [LOOK, *(step for spoil in spoils for step in (LOOK | {"spoil": spoil}, LOOK))]
    results, printed = serve_9_1(rounds + SERVED, options={"async_scheduling": True})
    assert "decode, FULL" in printed, "the default"
    assert isinstance(results[-1], list), results[-1]
    assert seen(results[:-1]) == [[], ["FULL"], [], ["FULL"], [], ["FULL"], []]
    assert right(SERVED, results[-1:], expected) == [True]


def test_a_replay_that_does_not_wait_for_the_last_is_seen(serve_9_1, expected):
    """The lengths of the second step arrive before the first has taken its own, so the second never gets any. Served
    with vllm-ascend's wait, results come by way of a second stream, and none is wrong or missing."""
    late, options = {"defects": ["late-replays"]}, FULL | {"async_scheduling": True}
    rounds = [LOOK, *SERVED, LOOK | {"spoil": "replays_not_awaited"}]
    results, _ = serve_9_1(rounds, options=options, machine=late)
    assert results[0] == {}
    assert right(SERVED, results[1:2], expected) == [True]
    assert "replays a graph that waits for an external event which nobody records" in results[2]


@pytest.mark.parametrize(
    ("cann", "machine", "spoil", "how"),
    [
        ("9.1", {"defects": ["first-replay"]}, None, "is not finite"),
        pytest.param(*("9.1", {}, "block_table_rebound", r"differs by [\d.]+ of the logits"), marks=pytest.mark.long),
        ("8.3", WORKSPACE, "block_table_rebound", r"differs by [\d.]+ of the logits"),
    ],
)
def test_wrong_full_graphs_are_replaced_by_pieces(cann, machine, spoil, how, serve_on, expected):
    results, printed = serve_on(cann)(SERVED, options=FULL, machine=machine, spoil=spoil, canary=True)
    found = re.findall(r"Full graphs compute wrong steps here \((.*)\); PIECEWISE graphs take their place", printed)
    assert len(found) == 1
    assert re.search(how, found[0])
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert right(SERVED, results, expected) == [True]


def test_wrong_pieces_end_the_start(serve_9_1):
    with pytest.raises(AssertionError, match="captured steps compute wrong results on this card"):
        serve_9_1(SERVED, options=PIECEWISE, spoil="replay_dropped", canary=True)


def test_an_unset_workspace_is_seen_before_anything_is_captured(serve_9_1, expected):
    results, printed = serve_9_1(SERVED, options=FULL, machine={"defects": ["unset-workspace"]}, canary=True)
    assert "FULL_DECODE_ONLY does not work here (a full layer: the replayed call did not follow" in printed
    assert right(SERVED, results, expected) == [True]
