"""The figures of eval.sh's report against known answers: σ, McNemar's exact p, pairing by prompt."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from eval_answers import Answer
from eval_statistics import Paired, mcnemar, pair, sigma


@pytest.mark.parametrize(
    ("share", "total", "points"), [(0.84, 14_042, 0.31), (0.84, 1_000, 1.16), (0.95, 100, 2.18), (0.5, 4, 25.0)]
)
def test_sigma_is_the_published_one(share: float, total: int, points: float) -> None:
    assert 100 * sigma(round(share * total), total) == pytest.approx(points, abs=0.005)


@pytest.mark.parametrize(("right", "total"), [(0, 7), (7, 7)])
def test_sigma_of_a_full_and_an_empty_score_is_zero(right: int, total: int) -> None:
    assert sigma(right, total) == 0


@pytest.mark.parametrize(("right", "total"), [(1, 0), (-1, 5), (6, 5)])
def test_sigma_refuses_what_is_no_score(right: int, total: int) -> None:
    with pytest.raises(ValueError, match="is no score"):
        sigma(right, total)


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
    ],
)
def test_mcnemar_gives_the_p_worked_out_by_hand(only_first: int, only_second: int, p: float) -> None:
    assert mcnemar(only_first, only_second) == pytest.approx(p, rel=1e-12)


def test_mcnemar_agrees_with_the_binomial_test_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed; make setup")
    for first, second in itertools.product((0, 1, 4, 17, 60, 400), (1, 3, 20, 75, 512)):
        expected = stats.binomtest(first, first + second, 0.5).pvalue
        assert mcnemar(first, second) == pytest.approx(expected, rel=1e-9), (first, second)


def test_mcnemar_of_thousands_neither_overflows_nor_rounds_to_one() -> None:
    assert mcnemar(5000, 5000) == 1
    assert 0 < mcnemar(4000, 5000) < 1e-20


def test_mcnemar_refuses_negative_counts() -> None:
    with pytest.raises(ValueError, match="no counts"):
        mcnemar(-1, 4)


def answers(*outcomes: tuple[str, str, bool]) -> list[Answer]:
    return [Answer(subject, prompt, "A", "A" if right else "B", right, "stop") for subject, prompt, right in outcomes]


def test_the_same_prompt_in_two_subjects_is_two_questions() -> None:
    first = answers(("law", "q", True), ("art", "q", False))
    second = answers(("art", "q", True), ("law", "q", True))
    assert pair(first, second) == Paired(both_right=1, only_first=0, only_second=1, both_wrong=0, unpaired=0)


def test_a_question_that_a_subject_has_twice_is_paired_twice() -> None:
    first = answers(("law", "q", True), ("law", "q", False), ("law", "r", False))
    second = answers(("law", "q", True), ("law", "r", False), ("law", "q", True))
    assert pair(first, second) == Paired(both_right=1, only_first=0, only_second=1, both_wrong=1, unpaired=0)


def test_questions_of_one_run_only_are_left_out_and_counted() -> None:
    first = answers(("law", "q", True), ("law", "r", False), ("law", "s", True))
    second = answers(("law", "q", False), ("law", "t", True))
    paired = pair(first, second)
    assert (paired.pairs, paired.only_first, paired.unpaired) == (1, 1, 3)


def test_runs_without_a_common_prompt_are_not_compared() -> None:
    with pytest.raises(ValueError, match="no prompt in common"):
        pair(answers(("law", "with examples: q", True)), answers(("law", "q", True)))


def test_the_paired_difference_and_its_error_are_those_of_plus_one_zero_minus_one() -> None:
    paired = Paired(both_right=70, only_first=12, only_second=4, both_wrong=14, unpaired=0)
    values = [1] * 12 + [-1] * 4 + [0] * 84
    mean = sum(values) / 100
    variance = sum((value - mean) ** 2 for value in values) / 100
    assert paired.difference == pytest.approx(mean)
    assert paired.difference_sigma == pytest.approx((variance / 100) ** 0.5)
