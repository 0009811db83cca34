"""FULL_DECODE_ONLY: steps that do not fit into one captured call."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import FULL, TOKENS, WORKSPACE, prompts, right

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("options", [{}, FULL], ids=["piecewise", "full decode graphs"])
def test_a_prefix_shared_by_more_requests_than_the_cache_has_blocks(options, serve, expected):
    """Eight requests read 2 shared blocks and their own one: 24 by the operator's count, in a cache of 14 (R32)."""
    (prefix,) = prompts((256,))
    rounds = [
        {"prompts": [[*prefix, 7]], "tokens": 1},
        {"prompts": [prefix + tail for tail in prompts(tuple(range(3, 11)), seed=2)], "tokens": TOKENS},
    ]
    rounds.append({**rounds[1], "spoil": "one_call_for_all"})
    options = {"num_gpu_blocks_override": 14, "max_model_len": 512, "max_num_batched_tokens": 512, **options}
    results, _ = serve(rounds, options=options, machine=WORKSPACE)
    assert right(rounds[:2], results[:2], expected) == [True, True]
    assert "[R32]" in results[2]
