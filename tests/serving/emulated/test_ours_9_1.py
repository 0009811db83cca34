"""gpt-oss by our plugin on vllm-ascend 0.23.0 and the emulated CANN 9.1, against transformers in float32."""

from __future__ import annotations

import re

import pytest

from tests.serving.emulated.rounds import (
    EAGER,
    FULL,
    LENGTHS,
    PIECEWISE,
    SPOILT,
    THREE_IN_A_BUCKET_OF_FOUR,
    TOKENS,
    graphs,
    right,
    turn,
)
from tests.serving.emulated.test_full_graphs import SHARED_PREFIX, SMALL_CACHE
from tests.serving.emulated.test_modes import ORDINARY, PIECES, PURE, SIZES
from tests.serving.emulated.test_two_devices import PARALLEL

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


FULL_AND_PIECEWISE = {"compilation_config": {"cudagraph_mode": "FULL_AND_PIECEWISE"}}
# options, graphs captured for a size, and graphs replayed by a decode step
MODES = {
    "eager": (EAGER, 0, 0),
    "piecewise": (PIECEWISE, PIECES, PIECES),
    "full decode graphs": ({}, 1, 1),
    "full and piecewise": (FULL_AND_PIECEWISE | {"async_scheduling": False}, PIECES + 1, 1),
}


@pytest.mark.parametrize("mode", [*list(MODES)[:-1], pytest.param("full and piecewise", marks=pytest.mark.long)])
def test_every_mode_equals_transformers_in_float32(mode, serve_9_1, expected):
    """Replays the graphs of the start in every decode step."""
    options, graphs_a_size, graphs_a_step = MODES[mode]
    rounds = ORDINARY + PURE
    results, printed = serve_9_1(rounds, options=options)
    assert right(rounds, results, expected) == [True] * len(rounds)
    assert not re.findall(r"Warning: .*\[R\d\d\]", printed), "a rule was broken that no card complains about"
    captured, replays = graphs(printed)
    assert captured == [len(SIZES) * graphs_a_size] * (len(rounds) + 1), "at the start"
    assert replays[len(ORDINARY) :] == [(TOKENS - 1) * graphs_a_step] * len(PURE)


@pytest.mark.long
def test_without_our_launch_the_layer_rotates_by_vllm_ascend(serve_9_1, expected):
    rounds = ORDINARY + PURE[:1]
    results, _ = serve_9_1(rounds, variables={"NPU_GPTOSS_KERNEL_DENSE_ROTATE_WRITE": "small_ops"})
    assert right(rounds, results, expected) == [True] * len(rounds)


QUICK = ("full decode graphs", "TP=2, experts in parallel")


@pytest.mark.parametrize(
    ("mode", "how"),
    [
        pytest.param(mode, how, marks=[pytest.mark.long] * ((mode, how) != QUICK))
        for mode in list(MODES)[:-1]
        for how in PARALLEL
    ],
)
def test_two_devices_equal_transformers_in_float32(mode, how, serve_9_1, expected):
    rounds = [turn((5,), seed=3), turn(LENGTHS), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    results, printed = serve_9_1(rounds, options={**MODES[mode][0], **PARALLEL[how]})
    assert right(rounds, results, expected) == [True, True, True]
    assert ("decode, FULL" in printed) == ("full" in mode)


def test_full_graphs_follow_each_steps_lengths_or_are_left(serve_9_1, expected):
    """Dropped and late updates are seen, and a call with more blocks than the cache has."""
    rounds = [turn(SPOILT), turn(SPOILT, seed=3, spoil="updates_dropped"), turn(SPOILT, seed=4)]
    rounds += [turn(SPOILT, seed=5, spoil="updates_late"), turn(SPOILT, seed=6)]
    rounds += SHARED_PREFIX
    results, printed = serve_9_1(rounds, options=SMALL_CACHE | FULL)
    assert right(rounds[:-1], results[:-1], expected) == [True, False, True, False, True, True, True]
    assert "[R32]" in results[-1]
    assert graphs(printed)[1] == [TOKENS - 1] * 5 + [0, 0]


# five requests come to need a second block of each group: 20 of 13. Of the last, the window leaves a block behind
CROWDED = [turn((121, 122, 123, 124, 125), tokens=9), turn((300, 60), seed=2), turn((121, 122, 123, 124, 125))]
WITHOUT_GROUPS = {"disable_hybrid_kv_cache_manager": True}


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        pytest.param(EAGER, True, marks=pytest.mark.long),
        pytest.param({}, True, marks=pytest.mark.long),
        (FULL, True),
        pytest.param(EAGER | WITHOUT_GROUPS, False, marks=pytest.mark.long),
        pytest.param(FULL | WITHOUT_GROUPS, False, marks=pytest.mark.long),
    ],
    ids=["eager", "piecewise", "full", "eager, one group", "full, one group"],
)
def test_preempted_requests_of_two_groups_equal_transformers(options, groups, serve_9_1, expected):
    """And layers that read the other group's blocks are seen, or there is no other group."""
    rounds = [*CROWDED, turn((300, 200), seed=7, spoil="first_groups_table")]
    results, printed = serve_9_1(rounds, options=SMALL_CACHE | options)
    assert right(rounds, results, expected) == [True, True, True, not groups]
    assert (re.findall(r'"preempted": (\d+)', printed)[1] != "0") == groups


@pytest.mark.long
def test_where_full_graphs_fail_the_pieces_are_captured(serve_9_1, expected):
    """A full decode graph always holds CANN's operator. vllm-ascend has prepared whole graphs by then."""
    rounds = [turn(SPOILT)]
    results, printed = serve_9_1(rounds, options=FULL, variables={"NPU_GPTOSS_KERNEL_ATTENTION_PAGED": "small_ops"})
    assert right(rounds, results, expected) == [True]
    assert "FULL_DECODE_ONLY does not work here (attention runs attention.paged.small_ops, and a full" in printed
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert "decode, FULL" not in printed


@pytest.mark.long
def test_on_cann_9_0_sinks_have_memory_behind_them(serve_9_1, expected):
    """Its kernel reads past their end, which 9.1's does not [R92]."""
    rounds, bare = [turn(SPOILT, seed=3)], turn(SPOILT, seed=4, spoil="sinks_without_slack")
    results, _ = serve_9_1([*rounds, bare], options=EAGER, machine={"cann": "9.0"})
    assert right(rounds, results[:1], expected) == [True]
    assert "[R92]" in results[1]


def test_a_card_without_triton_ascend_is_refused_before_anything_is_loaded(serve_9_1):
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve_9_1([], options=EAGER, spoil="without_triton")
    said = str(refusal.value)
    assert "npu-gptoss cannot serve this. triton-ascend: " in said
    assert "`pip install --no-deps triton-ascend==3.2.0` (vllm-ascend's own image has 3.2.2)" in said


@pytest.mark.long
def test_without_that_check_the_first_request_ends_the_engine(serve_9_1):
    results, _ = serve_9_1([turn((5,), tokens=1)], options=EAGER, spoil="without_triton_unchecked")
    assert results == ["TypeError: 'function' object is not subscriptable"]
