"""Requests that narrow their choice by top_k and top_p, in batches with others, on the emulated 910B."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.serving.emulated.rounds import EAGER, VOCABULARY, prompts

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

HOT = {"temperature": 1.0}
NARROW = {  # one token is left, so sampling is greedy
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


def outside(answers: list[dict[str, Any]]) -> set[str]:
    """The requests of `WIDE` that got a token which they may not get."""
    return {
        number
        for number, options in WIDE.items()
        for token, logprobs in zip(answers[int(number)]["tokens"], answers[int(number)]["logprobs"], strict=True)
        if token not in kept(torch.tensor(logprobs), **options)
    }


def test_a_choice_that_is_not_narrowed_is_seen(serve):
    """Otherwise the same check in test_modes.py shows nothing."""
    mixed = {"prompts": prompts((40,)) * 8, "tokens": 12, "sampling": NARROW | WIDE, "spoil": "choice_not_narrowed"}
    (together,), _ = serve([mixed], options=EAGER)
    greedy = together[0]["tokens"]
    assert all(together[number]["tokens"] != greedy for number in (1, 2, 3))
    assert outside(together) == {"4", "5", "6"}
