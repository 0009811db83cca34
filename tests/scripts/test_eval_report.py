"""The report of eval.sh reads evalscope's files, counts rightly, and refuses files that would mislead."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts.evalscope_files import ends, review, write_lines, write_run

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import eval_report
from eval_answers import ReportError, read_run

LAW = [True] * 6 + [False] * 2
MODEL = "gpt-oss-20b"
Report = Callable[..., str]


@pytest.fixture
def report(capsys: pytest.CaptureFixture) -> Report:
    def of(run: Path, *options: str | Path, status: int = 0) -> str:
        assert eval_report.main([str(run), *map(str, options)]) == status
        return "".join(capsys.readouterr())

    return of


def test_the_means_and_their_errors_equal_a_calculation_by_hand(tmp_path: Path, report: Report) -> None:
    printed = report(write_run(tmp_path / "run", {"law": LAW, "art": [True, False]}))
    assert "mean over questions: 70.00 (39.7 to 89.2) %**, 7 right" in printed
    # (3/4 + 1/2) / 2, less sqrt((75 - 40.9)² + (50 - 9.5)²) / 2
    assert "mean over subjects: 62.50 (36.0 to 84.7) %" in printed
    assert "| law | 8 | 6 | 75.00 (40.9 to 92.9) |" in printed
    assert "| art | 2 | 1 | 50.00 (9.5 to 90.5) |" in printed
    assert "a part of MMLU's 14042" in printed
    assert "few_shot_num 5" in printed
    assert "null" not in printed


@pytest.mark.parametrize(("model", "figures"), [(MODEL, (84.0, 83.41)), ("gpt-oss-120b-BF16", (88.0, 87.55))])
def test_the_published_figures_are_of_the_models_size(model, figures, tmp_path, report) -> None:
    printed = report(write_run(tmp_path / "run", {"law": [True] * 860 + [False] * 140}, model))
    for figure in figures:
        inside = "yes" if 83.71 < figure < 88.01 else "no"  # the interval of 86 % of 1000
        assert f"| {figure:g} | {86 - figure:+.2f} | {inside} |" in printed
    assert "1000 of them" in printed


def test_figures_of_another_size_or_effort_are_not_compared(tmp_path: Path, report: Report) -> None:
    tiny = write_run(tmp_path / "tiny", {"law": LAW}, "gpt-oss-tiny")
    assert "published" not in report(tiny)
    assert "87.55" in report(tiny, "--size", "120b")
    for benchmark, figure in (("mmlu", "83.41"), ("gpqa_diamond", "67.5")):
        run = write_run(tmp_path / benchmark, {"law": LAW}, benchmark=benchmark, effort="low")
        assert figure not in report(run)


def test_two_runs_are_compared_question_by_question(tmp_path: Path, report: Report) -> None:
    first = write_run(tmp_path / "first", {"law": [True] * 12 + [False] * 3})
    second = write_run(tmp_path / "second", {"law": [True] * 2 + [False] * 10 + [True] * 2 + [False]})
    printed = report(first, "--against", second)
    for words in ("| **first right** | 2 | 10 |", "| **first wrong** | 2 | 1 |", "p = 0.03857", "first run is better"):
        assert words in printed
    assert "cannot be told apart" in report(second, "--against", second)


def test_runs_with_other_prompts_are_not_compared(tmp_path: Path, report: Report) -> None:
    first, second = write_run(tmp_path / "first", {"law": LAW}), write_run(tmp_path / "second", {"law": LAW})
    rows = [review("law", index, right, prompt=f"with examples: {index}") for index, right in enumerate(LAW)]
    write_lines(second / f"reviews/{MODEL}/mmlu_law.jsonl", rows)
    assert "--few-shot" in report(first, "--against", second, status=2)


@pytest.mark.parametrize(("num", "score"), [(9, 0.75), (8, 0.76)])
def test_a_report_that_is_not_of_these_answers_is_refused(num: int, score: float, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / f"reports/{MODEL}/mmlu.json", [{"metrics": [{"num": num, "score": score}]}])
    with pytest.raises(ReportError, match=rf"{num} questions with a score of {score}"):
        read_run(run)


def test_answers_that_are_gone_are_missed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    shutil.rmtree(run / "reviews")
    with pytest.raises(ReportError, match="no scored answers"):
        read_run(run)
    shutil.rmtree(run / "reports")
    with pytest.raises(ReportError, match="8 questions are answered"):
        read_run(run)


def test_a_question_scored_twice_counts_once_and_odd_line_ends_are_text(tmp_path: Path) -> None:
    """Unicode's other line ends are text: evalscope writes them unescaped, and MMLU and models use them."""
    run = write_run(tmp_path / "run", {"law": [True, False]})
    rows = [review("law", 0, False, prompt="One\u2028two\x85three\u2029four?"), review("law", 1, False)]
    write_lines(run / f"reviews/{MODEL}/mmlu_law.jsonl", [*rows, review("law", 0, True, prompt="One\u2028two")])
    assert [answer.right for answer in read_run(run).answers] == [True, False]


@pytest.mark.parametrize("cut", [b'{"index": 9, "target": ["A"', '{"index": 9, "target": ["é'.encode()[:-1]])
def test_a_line_cut_off_by_an_interruption_is_no_answer(cut: bytes, tmp_path: Path) -> None:
    """Within a character too."""
    run = write_run(tmp_path / "run", {"law": LAW})
    for part in ("reviews", "predictions"):
        with (run / part / MODEL / "mmlu_law.jsonl").open("ab") as file:
            file.write(cut)
    assert len(read_run(run).answers) == 8
    (run / f"reports/{MODEL}/mmlu.json").unlink()
    with pytest.raises(ReportError, match="8 questions are answered"):
        read_run(run)


def test_replies_without_an_answer_and_cut_replies_are_reported(tmp_path: Path, report: Report) -> None:
    run = write_run(tmp_path / "run", {"law": [True, False, False]})
    rows = [review("law", 0, True), review("law", 1, False, ""), review("law", 2, False, "")]
    write_lines(run / f"reviews/{MODEL}/mmlu_law.jsonl", rows)
    write_lines(run / f"predictions/{MODEL}/mmlu_law.jsonl", ends("stop", "max_tokens", "model_length"))
    printed = report(run)
    assert "no answer found in 2 replies; 1 refused as too long, 0 that" in printed
    # the question that was cut may be right or wrong: 1 or 2 of 3
    assert "1 of 3 replies" in printed
    assert "--max-model-len" in printed
    assert "between 33.33 and 66.67 %" in printed


def test_the_bounds_of_a_cut_run_count_no_reply_twice(tmp_path: Path, report: Report) -> None:
    """A reply may give its answer before it is cut, and then counts as right already."""
    run = write_run(tmp_path / "run", {"main": [True, False, False]}, benchmark="gsm8k", max_tokens=512)
    write_lines(run / f"predictions/{MODEL}/gsm8k_main.jsonl", ends("max_tokens", "max_tokens"))
    printed = report(run)
    assert "2 of 3 replies were cut off at the token limit** (512: leave --max-tokens out). 1 of them" in printed
    assert "between 33.33 and 66.67 %" in printed


def test_a_benchmark_of_one_part_has_one_mean_and_its_own_size(tmp_path: Path, report: Report) -> None:
    printed = report(write_run(tmp_path / "run", {"default": [True] * 24 + [False] * 6}, MODEL, "aime25", "high"))
    assert "30 questions: all of AIME 2025." in printed
    assert "mean over questions: 80.00 (62.7 to 90.5) %**, 24 right" in printed
    assert "| 85.8 | -5.80 | yes |" in printed
    assert "subject" not in printed


def test_a_reply_that_evalscope_could_not_compare_is_wrong(tmp_path: Path, report: Report) -> None:
    """evalscope leaves such a question out of its mean; AIME's comparison has no name of its score."""
    run = write_run(tmp_path / "run", {"default": [True, False, True]}, benchmark="aime25")
    rows = [review("default", index, right) for index, right in enumerate((True, False, True))]
    for row, value in zip(rows, ({"acc": 1.0}, {"acc": 0.0}, {}), strict=True):
        row["sample_score"]["score"] |= {"value": value, "main_score_name": None}
    write_lines(run / f"reviews/{MODEL}/aime25_default.jsonl", rows)
    write_lines(run / f"reports/{MODEL}/aime25.json", [{"metrics": [{"num": 2, "score": 0.5}]}])
    printed = report(run)
    assert "mean over questions: 33.33" in printed
    assert "1 that evalscope could not compare" in printed


@pytest.mark.parametrize(
    ("place", "row", "words"),
    [
        (f"reviews/{MODEL}/gsm8k_main.jsonl", review("main", 0, True), r"benchmarks \(GSM8K, MMLU\)"),
        ("reviews/other/mmlu_law.jsonl", review("law", 0, True), "models"),
        # another evalscope's
        (f"reviews/{MODEL}/mmlu_law.jsonl", {"index": 0, "score": 1}, "KeyError"),
        (f"predictions/{MODEL}/mmlu_law.jsonl", {"index": 0, "model_output": ["stop"]}, "AttributeError"),
        (f"reports/{MODEL}/mmlu.json", {"metrics": [{"score": 0.75}]}, "KeyError"),
    ],
)
def test_a_folder_of_two_runs_or_of_other_files_is_refused(place, row, words, tmp_path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / place, [row])
    with pytest.raises(ReportError, match=words):
        read_run(run)


def test_a_folder_without_answers_is_refused(tmp_path: Path, report: Report) -> None:
    assert "predictions/MODEL" in report(tmp_path, status=2)
