"""gpt-oss by our plugin on vllm-ascend 0.23.0 and the emulated CANN 9.1, against transformers in float32."""

from __future__ import annotations

import re

import pytest

from emulator.tests.test_triton import needs_compiler
from tests.serving.emulated.rounds import EAGER, FULL, SPOILT, TOKENS, graphs, right, turn
from tests.serving.emulated.test_full_graphs import SHARED_PREFIX, SMALL_CACHE
from tests.serving.emulated.test_modes import ORDINARY, PURE


@pytest.mark.long
def test_without_our_launch_the_layer_rotates_by_vllm_ascend(serve_9_1, expected):
    rounds = ORDINARY + PURE[:1]
    results, _ = serve_9_1(rounds, variables={"NPU_GPTOSS_KERNEL_DENSE_ROTATE_WRITE": "small_ops"})
    assert right(rounds, results, expected) == [True] * len(rounds)


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
def test_on_cann_9_0_sinks_have_memory_behind_them(serve_9_1, expected):
    """Its kernel reads past their end, which 9.1's does not [R92]."""
    rounds, bare = [turn(SPOILT, seed=3)], turn(SPOILT, seed=4, spoil="sinks_without_slack")
    results, _ = serve_9_1([*rounds, bare], options=EAGER, machine={"cann": "9.0"})
    assert right(rounds, results[:1], expected) == [True]
    assert "[R92]" in results[1]


@needs_compiler
def test_a_launch_that_rotates_wrongly_is_not_served(serve_9_1):
    with pytest.raises(AssertionError, match="RoPE and the cache write compute wrong results on this card"):
        serve_9_1([], options=EAGER, spoil="rotated_wrongly")


def test_a_card_without_triton_ascend_is_refused_before_anything_is_loaded(serve_9_1):
    with pytest.raises(AssertionError, match="nothing was served") as refusal:
        serve_9_1([], options=EAGER, spoil="without_triton")
    said = str(refusal.value)
    assert "npu-gptoss cannot serve this. triton-ascend: " in said
    assert "`pip install --no-deps triton-ascend==3.2.0` (vllm-ascend's own image has 3.2.2)" in said
