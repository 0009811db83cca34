"""docs/accuracy.md: its tables of noise are what the scripts of the report compute."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import pytest

from tests.markdown import ROOT

PAGE = (ROOT / "docs/accuracy.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def scripts() -> Iterator[None]:
    """Scripts import each other by name."""
    sys.path.insert(0, str(ROOT / "scripts"))
    yield
    sys.path.remove(str(ROOT / "scripts"))


def rows(name: str) -> list[list[str]]:
    """Of the table behind the comment with this name: the numbers of each cell, without the head."""
    table = PAGE.partition(f"<!-- {name}: checked by tests/test_accuracy.py -->")[2].strip().partition("\n\n")[0]
    lines = table.splitlines()[2:]
    assert lines, name
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(cell: str) -> float:
    return float(re.match(r"[\d .]+", cell)[0].replace(" ", ""))


def test_sigma_is_the_reports() -> None:
    from eval_statistics import sigma

    for cells in rows("sigma"):
        n, at_84, at_88, seen = map(number, cells)
        # of a score that is no whole number of so few questions: by a thousand times as many
        exact = [100 * sigma(round(share * n * 1000), int(n) * 1000) * 1000**0.5 for share in (0.84, 0.88)]
        assert [at_84, at_88] == [round(value, 2) for value in exact]
        assert seen == round(2 * 2**0.5 * exact[0], 1)


def test_splits_are_the_least_uneven_that_mcnemar_calls_a_difference() -> None:
    from eval_statistics import Paired

    for cells in rows("mcnemar"):
        n, differ = (int(number(cell)) for cell in cells[:2])
        more, less = map(int, cells[2].split(" : "))
        assert more + less == differ

        def paired(first: int, n: int = n, differ: int = differ) -> Paired:
            return Paired(n - differ, first, differ - first, 0, 0)

        assert paired(more).p < 0.05 <= paired(more - 1).p
        assert number(cells[3]) == pytest.approx(100 * paired(more).difference, abs=0.0051 if n > 1000 else 1e-9)


def test_figures_of_vllms_recipe_are_those_that_the_report_uses() -> None:
    from eval_report import PUBLISHED

    for effort, *cells in rows("published"):
        figures = [PUBLISHED[name, effort][size] for name in ("gpqa_diamond", "aime25") for size in ("20b", "120b")]
        assert [float(cell) for cell in cells] == [figure for ((_, figure),) in figures]


def test_sizes_and_their_sigma_are_those_of_the_benchmarks() -> None:
    from eval_answers import BENCHMARKS
    from eval_statistics import sigma

    table = PAGE.partition("| `eval.sh` | questions |")[2].partition("\n\n")[0].splitlines()[2:]
    for benchmark, line in zip(BENCHMARKS[1:], table, strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        n = benchmark.questions
        assert number(cells[1]) == n
        shown = [float(word) for word in cells[-1].removesuffix(" points").split(", ")]
        assert shown == [round(100 * sigma(share * n, 10 * n) * 10**0.5, 2) for share in (5, 9)]


def test_the_distances_to_the_published_figures_are_in_sigma() -> None:
    from eval_answers import BENCHMARKS
    from eval_report import PUBLISHED
    from eval_statistics import sigma

    questions = BENCHMARKS[0].questions
    for size, distance, sigmas in (("20b", 0.59, 1.9), ("120b", 0.45, 1.6)):
        (_, openai), (_, article) = PUBLISHED["mmlu", "medium"][size]
        assert round(openai - article, 2) == distance
        error = 100 * sigma(round(article / 100 * questions), questions)
        assert round(distance / error, 1) == sigmas
        assert f"{distance} points, is {sigmas} σ" in PAGE or f"{distance}, {sigmas} σ" in PAGE
