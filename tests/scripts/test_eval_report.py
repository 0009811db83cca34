"""The report of eval.sh reads what evalscope wrote, counts it rightly, and refuses what would mislead."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.scripts.evalscope_files import review, write_lines, write_run

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import eval_report
from eval_answers import ReportError, read_run

LAW = [True] * 6 + [False] * 2
ART = [True, False]


def test_the_means_and_their_errors_are_those_worked_out_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert eval_report.main([str(write_run(tmp_path / "run", {"law": LAW, "art": ART}))]) == 0
    printed = capsys.readouterr().out
    # 7 of 10; sqrt(0.7 · 0.3 / 10) = 0.14491
    assert "mean over questions: 70.00 ± 14.49 %** (7 right)" in printed
    # (3/4 + 1/2) / 2; sqrt(0.75·0.25/8 + 0.5·0.5/2) / 2 = 0.19264
    assert "mean over subjects: 62.50 ± 19.26 %" in printed
    assert "| law | 8 | 6 | 75.00 ± 15.31 |" in printed
    assert "| art | 2 | 1 | 50.00 ± 35.36 |" in printed
    assert "10 questions of 2 subjects: a part of MMLU's 14042 questions" in printed
    assert "few_shot_num 5" in printed
    assert "null" not in printed


@pytest.mark.parametrize(("model", "figures"), [("gpt-oss-20b", (84.0, 83.41)), ("gpt-oss-120b-BF16", (88.0, 87.55))])
def test_the_published_figures_are_those_of_the_models_size(
    model: str, figures: tuple[float, float], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rights = [True] * 860 + [False] * 140
    assert eval_report.main([str(write_run(tmp_path / "run", {"law": rights}, model))]) == 0
    printed = capsys.readouterr().out
    for figure in figures:
        # one σ of 86 % of 1000 is 1.097 points
        assert f"| {figure:g} | {86 - figure:+.2f} | {(86 - figure) / 1.0973:+.1f} |" in printed
    assert "this run asked 1000 of them" in printed


def test_a_model_of_another_size_is_compared_with_nothing_published(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = str(write_run(tmp_path / "run", {"law": LAW}, "gpt-oss-tiny"))
    eval_report.main([run])
    assert "published" not in capsys.readouterr().out
    eval_report.main([run, "--size", "120b"])
    assert "87.55" in capsys.readouterr().out


def test_two_runs_are_compared_question_by_question(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = write_run(tmp_path / "first", {"law": [True] * 12 + [False] * 3})
    second = write_run(tmp_path / "second", {"law": [True] * 2 + [False] * 10 + [True] * 2 + [False]})
    assert eval_report.main([str(first), "--against", str(second)]) == 0
    printed = capsys.readouterr().out
    assert "| **first right** | 2 | 10 |" in printed
    assert "| **first wrong** | 2 | 1 |" in printed
    assert "p = 0.03857" in printed
    assert "The first run is better" in printed
    assert eval_report.main([str(second), "--against", str(second)]) == 0
    assert "cannot be told apart" in capsys.readouterr().out


def test_runs_with_other_prompts_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first, second = write_run(tmp_path / "first", {"law": LAW}), write_run(tmp_path / "second", {"law": LAW})
    rows = [review("law", index, right, prompt=f"with examples: {index}") for index, right in enumerate(LAW)]
    write_lines(second / "reviews/gpt-oss-20b/mmlu_law.jsonl", rows)
    assert eval_report.main([str(first), "--against", str(second)]) == 2
    assert "were not asked the same" in capsys.readouterr().err


def test_an_unfinished_run_has_no_score(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    (run / "reports/gpt-oss-20b/mmlu.json").unlink()
    with pytest.raises(ReportError, match=r"not finished: 8 questions are answered; run the same"):
        read_run(run)


def test_a_run_broken_off_before_anything_was_scored_is_not_finished(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    shutil.rmtree(run / "reviews")
    with pytest.raises(ReportError, match="has a report and no scored answers"):
        read_run(run)
    shutil.rmtree(run / "reports")
    with pytest.raises(ReportError, match="not finished: 8 questions are answered"):
        read_run(run)


def test_answers_that_are_missing_are_noticed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    path = run / "reviews/gpt-oss-20b/mmlu_law.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ReportError, match=r"8 questions with a score of 0\.75, the reviews 7 with 5 right"):
        read_run(run)


def test_a_score_that_differs_from_evalscopes_is_noticed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / "reports/gpt-oss-20b/mmlu.json", [{"metrics": [{"num": 8, "score": 0.875}]}])
    with pytest.raises(ReportError, match="run the same"):
        read_run(run)


def test_a_question_scored_again_counts_once_and_the_later_score_counts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": [True, False]})
    rows = [review("law", 0, False), review("law", 1, False), review("law", 0, True)]
    write_lines(run / "reviews/gpt-oss-20b/mmlu_law.jsonl", rows)
    assert [answer.right for answer in read_run(run).answers] == [True, False]


@pytest.mark.parametrize("cut", [b'{"index": 9, "target": ["A"', '{"index": 9, "target": ["é'.encode()[:-1]])
def test_a_line_cut_off_by_an_interruption_is_no_answer(cut: bytes, tmp_path: Path) -> None:
    """Within a character too."""
    run = write_run(tmp_path / "run", {"law": LAW})
    for part in ("reviews", "predictions"):
        with (run / part / "gpt-oss-20b/mmlu_law.jsonl").open("ab") as file:
            file.write(cut)
    assert len(read_run(run).answers) == 8
    (run / "reports/gpt-oss-20b/mmlu.json").unlink()
    with pytest.raises(ReportError, match="not finished: 8 questions are answered"):
        read_run(run)


def test_what_only_unicode_calls_the_end_of_a_line_is_text(tmp_path: Path) -> None:
    """evalscope writes it as it is, and MMLU and models use it: an answer would be lost, and no run ever whole."""
    run = write_run(tmp_path / "run", {"law": [True, False]})
    rows = [review("law", 0, True, prompt="One\u2028two\x85three\u2029four?"), review("law", 1, False)]
    write_lines(run / "reviews/gpt-oss-20b/mmlu_law.jsonl", rows)
    assert [answer.right for answer in read_run(run).answers] == [True, False]


def test_replies_without_an_answer_and_cut_replies_are_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_run(tmp_path / "run", {"law": [True, False, False]})
    rows = [review("law", 0, True), review("law", 1, False, ""), review("law", 2, False, "")]
    write_lines(run / "reviews/gpt-oss-20b/mmlu_law.jsonl", rows)
    ends = ["stop", "max_tokens", "model_length"]
    ended = [{"index": i, "model_output": {"choices": [{"stop_reason": end}]}} for i, end in enumerate(ends)]
    write_lines(run / "predictions/gpt-oss-20b/mmlu_law.jsonl", ended)
    eval_report.main([str(run)])
    printed = capsys.readouterr().out
    assert "no answer found in 2 replies; 1 refused as too long, 0 that evalscope could not compare" in printed
    # the question that was cut may be right or wrong: 1 or 2 of 3
    assert "1 of 3 replies were cut off at the token limit** (the server's: raise its --max-model-len)" in printed
    assert "between 33.33 and 66.67 %" in printed


def test_the_bounds_of_a_cut_run_count_no_reply_twice(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """A reply may have told its answer before it was cut: that one is right already."""
    run = write_run(tmp_path / "run", {"main": [True, False, False]}, benchmark="gsm8k", max_tokens=512)
    ended = [{"index": i, "model_output": {"choices": [{"stop_reason": "max_tokens"}]}} for i in (0, 1)]
    write_lines(run / "predictions/gpt-oss-20b/gsm8k_main.jsonl", ended)
    assert eval_report.main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "2 of 3 replies were cut off at the token limit** (512: leave --max-tokens out). 1 of them" in printed
    assert "between 33.33 and 66.67 %" in printed


def test_a_benchmark_of_one_part_has_one_mean_and_its_own_size(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = write_run(tmp_path / "run", {"default": [True] * 24 + [False] * 6}, "gpt-oss-20b", "aime25", "high")
    eval_report.main([str(run)])
    printed = capsys.readouterr().out
    assert printed.startswith("# AIME 2025 of gpt-oss-20b\n\n30 questions: all of AIME 2025.")
    # sqrt(0.8 · 0.2 / 30) = 0.07303; 80 - 85.8 = -5.8 points
    assert "mean over questions: 80.00 ± 7.30 %** (24 right)" in printed
    assert "| 85.8 | -5.80 | -0.8 |" in printed
    assert "subject" not in printed
    assert "no reply was cut off" in printed


def test_figures_of_another_effort_are_not_set_beside_a_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for benchmark, effort, figure in (("mmlu", "low", "83.41"), ("gpqa_diamond", "low", "67.5")):
        run = write_run(tmp_path / f"{benchmark}-{effort}", {"law": LAW}, benchmark=benchmark, effort=effort)
        eval_report.main([str(run)])
        assert figure not in capsys.readouterr().out


def test_a_reply_that_evalscope_could_not_compare_is_wrong_and_no_reason_to_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """It leaves such a question out of its own mean; AIME's comparison has no name of its score."""
    run = write_run(tmp_path / "run", {"default": [True, False, True]}, benchmark="aime25")
    rows = [review("default", index, right) for index, right in enumerate((True, False, True))]
    for row, value in zip(rows, ({"acc": 1.0}, {"acc": 0.0}, {}), strict=True):
        row["sample_score"]["score"] |= {"value": value, "main_score_name": None}
    write_lines(run / "reviews/gpt-oss-20b/aime25_default.jsonl", rows)
    write_lines(run / "reports/gpt-oss-20b/aime25.json", [{"metrics": [{"num": 2, "score": 0.5}]}])
    assert eval_report.main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "mean over questions: 33.33" in printed
    assert "1 that evalscope could not compare" in printed


def test_a_folder_with_two_benchmarks_is_ambiguous(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / "reviews/gpt-oss-20b/gsm8k_main.jsonl", [review("main", 0, True)])
    with pytest.raises(ReportError, match=r"several benchmarks \(GSM8K, MMLU\)"):
        read_run(run)


def test_a_folder_with_two_models_is_ambiguous(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / "reviews/other/mmlu_law.jsonl", [review("law", 0, True)])
    with pytest.raises(ReportError, match="several models"):
        read_run(run)


def test_a_folder_without_answers_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert eval_report.main([str(tmp_path)]) == 2
    assert "holds no answers: expected predictions/MODEL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("place", "row"),
    [
        ("reviews/gpt-oss-20b/mmlu_law.jsonl", {"index": 0, "score": 1}),
        ("predictions/gpt-oss-20b/mmlu_law.jsonl", {"index": 0, "model_output": ["stop"]}),
        ("reports/gpt-oss-20b/mmlu.json", {"metrics": [{"score": 0.75}]}),
    ],
)
def test_files_of_another_evalscope_are_refused_in_words(place: str, row: dict[str, object], tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", {"law": LAW})
    write_lines(run / place, [row])
    with pytest.raises(ReportError, match=r"is not what evalscope 1\.14 writes"):
        read_run(run)
