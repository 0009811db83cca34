"""On the emulated 910B, too, a failing request ends alone, and a seed's tokens depend only on the request."""

from __future__ import annotations

import pytest

from tests.serving.emulated.rounds import EAGER, FULL, VOCABULARY, WORKSPACE, prompts, turn

CACHELESS = {"enable_prefix_caching": False}
SEEDED = {"temperature": 1.0, "seed": 11}
ALONE = turn((700,), seed=1, tokens=8) | {"sampling": {"0": SEEDED}}
# 1100 tokens a step: the second prompt of 700 is cut
CUT = {"prompts": prompts((700,), 2) + ALONE["prompts"], "tokens": 8, "sampling": {"1": SEEDED}}
WILD = 5 * VOCABULARY
HOSTILE = {
    "1": {"min_tokens": 3, "stop_token_ids": [WILD, 2**40, -1]},
    "2": {"allowed_token_ids": [1, WILD]},
    "3": {"temperature": float("nan")},
    "5": {"prompt_logprobs": -1},
}


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param({"options": EAGER | CACHELESS}, marks=pytest.mark.long),  # as steps with prompts run in the other
        {"options": FULL | CACHELESS, "machine": WORKSPACE},
    ],
    ids=["eager", "full decode graphs"],
)
def test_hostile_requests_end_alone_and_a_seed_stands_a_cut_prompt(mode, serve):
    honest = turn((40,), seed=3)
    mixed = turn((41, 42, 43, 44, 45, 46), seed=4)
    mixed["prompts"][0] = honest["prompts"][0]
    mixed["prompts"][4][7] = -WILD
    again = turn((40,), seed=3)
    results, _ = serve([ALONE, CUT, honest, mixed | {"sampling": HOSTILE}, again], **mode)
    assert [type(said) for said in results] == [list] * 5, results
    alone, together, calm, stormy, after = results
    assert together[1]["tokens"] == alone[0]["tokens"]
    assert calm[0]["tokens"] == stormy[0]["tokens"] == after[0]["tokens"]
    ended = [bool(answer["ended"]) for answer in stormy]
    assert ended == [False, False, True, True, True, False], [answer["ended"] for answer in stormy]
