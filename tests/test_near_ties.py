"""Regrets of many answers equal the regrets of single answers."""

from __future__ import annotations

import math

import torch

from tests.near_ties import parting, regrets


class Exact:
    """Replaces the engine: logits depend on the sum of all tokens before."""

    def __init__(self) -> None:
        self.rows = 0

    def batch_logits(self, prompts: list[tuple[int, ...]], *, last: list[int]) -> list[torch.Tensor]:
        self.rows += sum(last)
        sums = [torch.tensor(prompt).cumsum(0)[-count:] for prompt, count in zip(prompts, last, strict=True)]
        return [torch.sin(each[:, None] * torch.arange(1, 11)) for each in sums]


ALONE = (1, 2, 3, 4, 5)
ANSWERS = [
    ((7, 8), (1, 2, 9, 4, 5), ALONE),
    ((7, 8), (1, 2, 3, 4, 9), ALONE),
    ((7, 8), (9,), ALONE),
    ((7, 8), (1, 2, 9, 1, 1), ALONE),
    ((5,), (1, 2, 8), ALONE),
    ((7, 8), ALONE, ALONE),
    ((7, 8), ALONE[:2], ALONE),
]


def test_answers_that_part_at_several_places_each_have_their_own_regret() -> None:
    together = regrets(Exact(), ANSWERS)
    assert together == [regrets(Exact(), [answer])[0] for answer in ANSWERS]
    assert together[0] == together[3]
    assert together[-2:] == [None, None]
    prompt, ours, theirs = ANSWERS[1]
    place = parting(ours, theirs)
    one, other = (math.sin(sum((*prompt, *ours[:place])) * (token + 1)) for token in (ours[place], theirs[place]))
    assert math.isclose(together[1], abs(one - other), abs_tol=1e-5)


def test_common_prefixes_are_computed_once() -> None:
    exact = Exact()
    regrets(exact, ANSWERS[:3] * 50)
    assert exact.rows == len(ALONE)
