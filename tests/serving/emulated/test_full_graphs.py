"""FULL_DECODE_ONLY: steps that do not fit into one captured call."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import FULL, TOKENS, WORKSPACE, prompts, right

(PREFIX,) = prompts((256,))
TOGETHER = {"prompts": [PREFIX + tail for tail in prompts(tuple(range(3, 11)), seed=2)], "tokens": TOKENS}
# eight requests read 2 shared blocks and their own one: 24 by the operator's count, in a cache of 14 (R32)
SHARED_PREFIX = [{"prompts": [[*PREFIX, 7]], "tokens": 1}, TOGETHER, {**TOGETHER, "spoil": "one_call_for_all"}]
SMALL_CACHE = {"num_gpu_blocks_override": 14, "max_model_len": 512, "max_num_batched_tokens": 512}


# a step that leaves its full graph takes the calls of the pieces
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.long), FULL], ids=["piecewise", "full decode graphs"]
)
def test_a_prefix_shared_by_more_requests_than_the_cache_has_blocks(options, serve, expected):
    results, _ = serve(SHARED_PREFIX, options=SMALL_CACHE | options, machine=WORKSPACE)
    assert right(SHARED_PREFIX[:2], results[:2], expected) == [True, True]
    assert "[R32]" in results[2]
