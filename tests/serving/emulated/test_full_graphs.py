"""FULL_DECODE_ONLY: what it needs of the machine, and steps that do not fit into one captured call."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import FULL, THREE_IN_A_BUCKET_OF_FOUR, TOKENS, WORKSPACE, prompts, right, turn

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


def test_they_turn_to_piecewise_with_one_line_where_the_probe_fails(serve, expected):
    """CANN 8.3 as published refuses to say how much workspace a TND call needs (R37)."""
    rounds = [turn(THREE_IN_A_BUCKET_OF_FOUR)]
    results, printed = serve(rounds, options=FULL)
    assert printed.count("FULL_DECODE_ONLY does not work here (a full layer: ") == 1
    assert "[R37]" in printed
    assert "mixed prefill-decode, PIECEWISE" in printed
    assert "decode, FULL" not in printed
    assert right(rounds, results, expected) == [True]
