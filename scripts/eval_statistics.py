"""The statistics of eval.sh's report: Wilson's interval of a score, and McNemar's exact test of two runs.

A score of n questions would be another for as many other questions of the same kind. Wilson's interval (1927) has the
true share in 95 % of cases, also where all answers are right: 60 of 60 is 94.0 to 100 %. Of two means it says little:
it is wide. Two runs on the same questions are compared far more sharply in pairs: only the questions count that one
run got right and the other wrong. If both runs are equally good, each such question is a fair coin (McNemar 1947;
the exact binomial form).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from eval_answers import Answer

Z = 1.959964  # of 95 %


def wilson(right: int, total: int) -> tuple[float, float]:
    """The ends of Wilson's interval of right / total, as fractions (0.01 is one percentage point)."""
    if not 0 <= right <= total or total == 0:
        raise ValueError(f"{right} of {total} is no score")
    share, spread = right / total, Z * Z / total
    middle = (share + spread / 2) / (1 + spread)
    half = Z * math.sqrt(share * (1 - share) / total + spread / (4 * total)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean_interval(scores: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The interval of a mean of shares (right, total): distances to Wilson's ends, squared, added (Newcombe 1998)."""
    mean = sum(right / total for right, total in scores) / len(scores)
    ends = [(right / total, *wilson(right, total)) for right, total in scores]
    low, high = (math.sqrt(sum((share[0] - share[end]) ** 2 for share in ends)) / len(scores) for end in (1, 2))
    return mean - low, mean + high


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
        """Score of the first less the score of the second, on the pairs, as a fraction."""
        return (self.only_first - self.only_second) / self.pairs

    @property
    def difference_sigma(self) -> float:
        """Standard error of `difference`, a mean of values +1, 0 and -1."""
        mean_square = (self.only_first + self.only_second) / self.pairs
        return math.sqrt(max(0.0, mean_square - self.difference**2) / self.pairs)


def _keyed(answers: Iterable[Answer]) -> dict[tuple[str, str, int], bool]:
    """Questions by subject and full prompt. MMLU has a few twice in a subject: their order tells them apart."""
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
