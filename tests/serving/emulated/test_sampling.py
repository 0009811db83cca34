"""Requests that narrow their choice by top_k and top_p, in batches with others, in every mode of the emulated 910B."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.serving.emulated.rounds import EAGER, FULL, VOCABULARY, WORKSPACE, prompts, right, turn

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

MODES: dict[str, dict[str, Any]] = {
    "eager": {"options": EAGER},
    "piecewise": {},
    "full decode graphs": {"options": FULL, "machine": WORKSPACE},
}
HOT = {"temperature": 1.0}
NARROW = {  # one token is left: greedy, whatever is drawn
    "1": HOT | {"top_k": 1},
    "2": HOT | {"top_p": 1e-6},
    "3": {"temperature": 1.7, "top_k": 1, "top_p": 0.5},
}
WIDE = {
    "4": HOT | {"top_k": 3, "seed": 1},
    "5": HOT | {"top_p": 0.6, "seed": 2},
    "6": {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "seed": 3},
    "7": HOT | {"seed": 4},
}


def kept(
    logprobs: torch.Tensor, temperature: float = 1.0, top_k: int = VOCABULARY, top_p: float = 1.0, **_: Any
) -> set:
    """The tokens that a request may get, by definition: the k likeliest, and of these the fewest that reach p."""
    likely = (logprobs / temperature).topk(top_k)
    probabilities = likely.values.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities
    return set(likely.indices[before < top_p].tolist())


@pytest.mark.parametrize("mode", MODES)
def test_a_narrowed_choice_is_kept_beside_requests_of_all_kinds(mode, serve, expected):
    prompt = (40,)
    mixed = {"prompts": prompts(prompt) * 8, "tokens": 12, "sampling": NARROW | WIDE}
    results, _ = serve([turn(prompt, tokens=12), mixed], **MODES[mode])
    assert right([turn(prompt, tokens=12), mixed], results, expected) == [True, True]
    (alone,), together = results
    greedy = alone["tokens"]
    assert [together[number]["tokens"] for number in range(4)] == [greedy] * 4
    for number, options in WIDE.items():
        answer = together[int(number)]
        for token, logprobs in zip(answer["tokens"], answer["logprobs"], strict=True):
            assert token in kept(torch.tensor(logprobs), **options), options
        assert answer["tokens"] != greedy, "nothing was drawn"


def test_a_choice_that_is_not_narrowed_is_seen(serve):
    """Otherwise the test above shows nothing."""
    mixed = {"prompts": prompts((40,)) * 8, "tokens": 12, "sampling": NARROW | WIDE, "spoil": "choice_not_narrowed"}
    (together,), _ = serve([mixed], options=EAGER)
    greedy = together[0]["tokens"]
    assert all(together[number]["tokens"] != greedy for number in (1, 2, 3))
    outside = [
        number
        for number, options in WIDE.items()
        for token, logprobs in zip(together[int(number)]["tokens"], together[int(number)]["logprobs"], strict=True)
        if token not in kept(torch.tensor(logprobs), **options)
    ]
    assert set(outside) == {"4", "5", "6"}


def test_tokens_are_drawn_as_often_as_their_probabilities_say(serve, expected):
    """240 draws of one token among the three likeliest: within five standard deviations of each share."""
    rounds = [
        {
            "prompts": prompts((5,), seed=7) * 240,
            "tokens": 1,
            "sampling": {str(number): HOT | {"top_k": 3} for number in range(240)},
        }
    ]
    (answers,), _ = serve(rounds)
    likely = expected(tuple(rounds[0]["prompts"][0]), (0,))[0].topk(3)
    shares = likely.values.softmax(-1)
    drawn = torch.tensor([answer["tokens"][0] for answer in answers])
    assert set(drawn.tolist()) == set(likely.indices.tolist())
    for token, share in zip(likely.indices, shares, strict=True):
        deviation = (share * (1 - share) / len(drawn)).sqrt()
        assert abs((drawn == token).float().mean() - share) < 5 * deviation
