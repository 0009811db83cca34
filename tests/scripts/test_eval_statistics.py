"""The figures of eval.sh's report against known answers: Wilson's interval, McNemar's exact p, pairing by prompt."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from eval_answers import Answer
from eval_statistics import Paired, mcnemar, mean_interval, pair, wilson


@pytest.mark.parametrize(
    ("right", "total", "ends"),
    # 81 of 263 and 0 of 20 of Newcombe, Statistics in Medicine 17 (1998), table I
    [(81, 263, (25.53, 36.62)), (0, 20, (0.0, 16.11)), (60, 60, (93.98, 100.0)), (3, 12, (8.89, 53.23))],
)
def test_the_interval_is_not_wilsons(right: int, total: int, ends: tuple[float, float]) -> None:
    assert [100 * end for end in wilson(right, total)] == pytest.approx(ends, abs=0.005)
    assert mean_interval([(right, total)]) == pytest.approx(wilson(right, total))
    # four alike: a mean of independent shares has half the interval
    assert mean_interval([(right, total)] * 4)[0] == pytest.approx((right / total + wilson(right, total)[0]) / 2)


@pytest.mark.parametrize(("right", "total"), [(1, 0), (-1, 5), (6, 5)])
def test_an_impossible_score_is_refused(right: int, total: int) -> None:
    with pytest.raises(ValueError, match=f"{right} of {total}"):
        wilson(right, total)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1.0),
        (3, 3, 1.0),
        (1, 0, 1.0),  # 2 · 1/2
        (5, 0, 2 / 32),
        (0, 6, 2 / 64),
        (10, 2, 2 * (1 + 12 + 66) / 4096),
        (2, 10, 2 * (1 + 12 + 66) / 4096),
        (4, 3, 1.0),  # twice the tail is 1 exactly, and p is not above 1
        (5000, 5000, 1.0),
    ],
)
def test_mcnemar_gives_the_p_worked_out_by_hand(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, rel=1e-12)
    assert 0 < mcnemar(4000, 5000) < 1e-20, "no overflow"


def answers(*outcomes: tuple[str, str, bool]) -> list[Answer]:
    return [Answer(subject, prompt, "A", "A" if right else "B", right, "stop") for subject, prompt, right in outcomes]


LAW, ART = ("law", "q"), ("art", "q")


@pytest.mark.parametrize(
    ("first", "second", "paired"),
    [
        # the same prompt in two subjects is two questions
        (((*LAW, True), (*ART, False)), ((*ART, True), (*LAW, True)), Paired(1, 0, 1, 0, 0)),
        # a question that a subject has twice is paired twice
        (
            ((*LAW, True), (*LAW, False), ("law", "r", False)),
            ((*LAW, True), ("law", "r", False), (*LAW, True)),
            Paired(1, 0, 1, 1, 0),
        ),
        # questions of one run only are left out and counted
        (
            ((*LAW, True), ("law", "r", False), ("law", "s", True)),
            ((*LAW, False), ("law", "t", True)),
            Paired(0, 1, 0, 0, 3),
        ),
    ],
)
def test_answers_are_paired_by_subject_and_prompt(first: tuple, second: tuple, paired: Paired) -> None:
    assert pair(answers(*first), answers(*second)) == paired


def test_runs_without_a_common_prompt_are_not_compared() -> None:
    with pytest.raises(ValueError, match="no prompt in common"):
        pair(answers(("law", "with examples: q", True)), answers((*LAW, True)))


def test_the_paired_difference_and_its_error_are_of_one_zero_minus_one() -> None:
    paired = Paired(both_right=70, only_first=12, only_second=4, both_wrong=14, unpaired=0)
    values = [1] * 12 + [-1] * 4 + [0] * 84
    mean = sum(values) / 100
    variance = sum((value - mean) ** 2 for value in values) / 100
    assert paired.difference == pytest.approx(mean)
    assert paired.difference_sigma == pytest.approx((variance / 100) ** 0.5)
