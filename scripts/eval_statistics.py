"""The statistics of eval.sh's report: the binomial σ of a score, and McNemar's exact test of two runs. Exact integers.

A score p of n questions has the standard error sqrt(p (1 - p) / n): what the score would vary by if as many other
questions of the same kind were asked. It is the noise in a comparison of two means, and it is large. Two runs on the
same questions are compared far more sharply in pairs: only the questions count that one run got right and the other
wrong, and if both are equally good, each of those falls to either side like a coin (McNemar 1947; the exact binomial
form).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from eval_answers import Answer


def sigma(right: int, total: int) -> float:
    """The binomial standard error of right / total, as a fraction (0.01 is one percentage point)."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} of {total} is no score")
    share = right / total
    return math.sqrt(share * (1 - share) / total)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p of at least so uneven a split of the questions on which two equally good runs differ."""
    if min(only_first, only_second) < 0:
        raise ValueError(f"{only_first} and {only_second} are no counts")
    n = only_first + only_second
    tail = ways = 1
    for k in range(min(only_first, only_second)):
        ways = ways * (n - k) // (k + 1)  # n over k + 1; each anew takes seconds for thousands
        tail += ways
    return float(min(Fraction(1), Fraction(2 * tail, 2**n)))


@dataclass(frozen=True)
class Paired:
    """Two runs, question by question. `unpaired`: questions that only one of the two was asked."""

    both_right: int
    only_first: int
    only_second: int
    both_wrong: int
    unpaired: int

    @property
    def pairs(self) -> int:
        return self.both_right + self.only_first + self.only_second + self.both_wrong

    @property
    def p(self) -> float:
        return mcnemar(self.only_first, self.only_second)

    @property
    def difference(self) -> float:
        """Score of the first less that of the second, on the pairs, as a fraction."""
        return (self.only_first - self.only_second) / self.pairs

    @property
    def difference_sigma(self) -> float:
        """Standard error of `difference`: that of a mean of values +1, 0 and -1."""
        mean_square = (self.only_first + self.only_second) / self.pairs
        return math.sqrt(max(0.0, mean_square - self.difference**2) / self.pairs)


def _keyed(answers: Iterable[Answer]) -> dict[tuple[str, str, int], bool]:
    """Questions by subject and full prompt. MMLU has a few twice in a subject: those are told apart by their order."""
    keyed: dict[tuple[str, str, int], bool] = {}
    for answer in answers:
        count = 0
        while (answer.subject, answer.prompt, count) in keyed:
            count += 1
        keyed[answer.subject, answer.prompt, count] = answer.right
    return keyed


def pair(first: Iterable[Answer], second: Iterable[Answer]) -> Paired:
    """Pairs the answers to the same prompts. Raises ValueError when there is no common one."""
    one, two = _keyed(first), _keyed(second)
    common = one.keys() & two.keys()
    if not common:
        raise ValueError("the two runs have no prompt in common")
    outcomes = [(one[key], two[key]) for key in common]
    return Paired(
        outcomes.count((True, True)),
        outcomes.count((True, False)),
        outcomes.count((False, True)),
        outcomes.count((False, False)),
        len(one) + len(two) - 2 * len(common),
    )
