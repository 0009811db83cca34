"""eval.sh asks the published benchmarks, MMLU as the Ascend article, resumes where it stopped, and refuses in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scripts.fake_server import fake_server
from tests.scripts.shell import SCRIPTS, beside_a_fake_evalscope, following, printed_command, run

# Questions of MMLU's test split by subject, in the order of the subjects' names; as on the dataset's card, which has
# 14 042 for all. evalscope downloads what it asks, so nothing else depends on these.
SIZES = (
    *(100, 135, 152, 100, 265, 144, 100, 100, 100, 173, 102, 100, 235, 114, 145, 378, 126, 100, 310, 203),
    *(100, 165, 198, 193, 390, 270, 238, 151, 545, 216, 204, 237, 223, 131, 121, 108, 163, 112, 103, 234),
    *(100, 783, 346, 895, 306, 311, 324, 282, 1534, 272, 612, 110, 245, 201, 100, 166, 171),
)
ALL = {"mmlu": ("mmlu", 5), "gsm8k": ("gsm8k", 4), "gpqa": ("gpqa_diamond", 0), "aime25": ("aime25", 0)}


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    return beside_a_fake_evalscope(tmp_path / "repository", status=1)


def dry(scripts: Path, benchmark: str, *options: str | Path) -> tuple[dict[str, str], list[str]]:
    done = run("eval.sh", "--model", "gpt-oss-20b", "--dry-run", benchmark, *options, scripts=scripts)
    return printed_command(done)


@pytest.mark.parametrize("benchmark", ALL)
def test_the_defaults_are_the_articles_without_a_token_limit(benchmark: str, scripts: Path) -> None:
    """A limit of 512 tokens cuts thoughts off: GSM8K then loses points that the model has."""
    variables, words = dry(scripts, benchmark)
    dataset, shots = ALL[benchmark]
    assert variables == {}
    article = ["eval", "--model", "gpt-oss-20b", "--api-url", "http://127.0.0.1:8085/v1", "--api-key", "EMPTY"]
    assert words[1 : len(article) + 1] == article
    plain = {"--datasets": dataset, "--eval-batch-size": "16", "--seed": "42"}
    assert {flag: following(words, flag) for flag in plain} == plain
    assert json.loads(following(words, "--dataset-args")) == {dataset: {"few_shot_num": shots}}
    generation = json.loads(following(words, "--generation-config"))
    assert generation == {"temperature": 0, "reasoning_effort": "medium", "timeout": 3600}
    assert following(words, "--work-dir") == f"outputs/{benchmark}-gpt-oss-20b-medium"
    assert {"--limit", "--use-cache"}.isdisjoint(words)


def test_mmlu_sh_is_the_short_form_of_eval_sh(scripts: Path) -> None:
    options = ("--model", "m", "--dry-run", "--gate", "--effort", "low", "--", "--debug")
    long, short = (run(*words, *options, scripts=scripts) for words in (("eval.sh", "mmlu"), ("mmlu.sh",)))
    assert printed_command(long) == printed_command(short)
    assert run("mmlu.sh", "--help", scripts=scripts).stdout == run("eval.sh", "--help", scripts=scripts).stdout


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ("--effort high", "16384"),
        ("--effort high --max-tokens 900", "900"),
        ("--effort high --max-tokens 70000", ""),
        ("", ""),
    ],
)
def test_a_context_too_short_for_long_thoughts_is_warned_of(options: str, tokens: str, scripts: Path) -> None:
    """The fake server allows 16 384 tokens."""
    with fake_server({"served": ""}) as url:
        done = run("eval.sh", "aime25", "--dry-run", "--url", url, *options.split(), scripts=scripts)
    assert done.returncode == 0
    assert ("--max-model-len 65536" in done.stderr) == bool(tokens)
    assert f" {tokens}" in done.stderr + " "


def test_the_gate_has_exactly_a_thousand_questions_of_all_subjects(scripts: Path) -> None:
    _, words = dry(scripts, "mmlu", "--gate")
    part = float(following(words, "--limit"))
    counts = [int(size * part) for size in SIZES]  # evalscope's rule; tests/scripts/test_evalscope.py asks evalscope
    assert (len(SIZES), sum(SIZES), sum(counts), min(counts)) == (57, 14_042, 1000, 7)
    assert json.loads(following(words, "--dataset-args"))["mmlu"]["shuffle"] is True
    assert following(words, "--seed") == "42"


def test_options_reach_evalscope(scripts: Path, tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    options = ["--effort", "high", "--batch", "4", "--few-shot", "0", "--max-tokens", "900", "--limit", "3"]
    variables, words = dry(scripts, "mmlu", *options, "--data", tmp_path, "--", "--debug")
    assert variables == {"HF_HUB_OFFLINE": "1"}
    assert json.loads(following(words, "--dataset-args")) == {"mmlu": {"few_shot_num": 0, "local_path": str(tmp_path)}}
    generation = json.loads(following(words, "--generation-config"))
    assert (generation["reasoning_effort"], generation["max_tokens"]) == ("high", 900)
    assert (following(words, "--eval-batch-size"), following(words, "--limit")) == ("4", "3")
    assert words[-1] == "--debug"


def test_a_work_directory_with_answers_is_resumed(scripts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "configs").mkdir(parents=True)
    (out / "configs" / "task_config.yaml").touch()
    _, words = dry(scripts, "mmlu", "--out", out)
    assert "--use-cache" not in words, "nothing is answered: after a failed download --data may be added"
    (out / "predictions" / "gpt-oss-20b").mkdir(parents=True)
    (out / "predictions" / "gpt-oss-20b" / "mmlu_anatomy.jsonl").touch()
    _, words = dry(scripts, "mmlu", "--out", out)
    assert following(words, "--use-cache") == following(words, "--work-dir") == str(out)


def test_answers_of_another_address_are_not_gone_on_with(scripts: Path, tmp_path: Path) -> None:
    """evalscope ends with "Cached evaluation identity does not match"."""
    out = scripts.parent / "outputs/mmlu-gpt-oss-20b-medium"
    (out / "configs").mkdir(parents=True)
    (out / "configs/task_config.yaml").write_text("api_key: EMPTY\napi_url: http://127.0.0.1:8000/v1\n")
    elsewhere = dry(scripts, "mmlu")[1]
    assert following(elsewhere, "--work-dir") == "outputs/mmlu-gpt-oss-20b-medium-127.0.0.1-8085"
    assert following(dry(scripts, "mmlu", "--url", "http://127.0.0.1:8000")[1], "--work-dir") == str(out)[-31:]
    done = run("eval.sh", "mmlu", "--model", "gpt-oss-20b", "--dry-run", "--out", out, scripts=scripts)
    assert done.returncode == 2
    assert "name another folder with --out" in done.stderr


def test_runs_that_ask_other_things_get_other_folders(scripts: Path) -> None:
    variants = ("", "--gate", "--limit 2", "--effort low", "--effort low --gate")
    folders = [following(dry(scripts, "mmlu", *options.split())[1], "--work-dir") for options in variants]
    assert len(set(folders)) == len(variants)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("", "mmlu, gsm8k, gpqa or aime25"),
        ("mmlu gsm8k", "mmlu or gsm8k"),
        ("mmlu --effort extreme", "'extreme'"),
        ("mmlu --few-shot 6", "0 to 5, got '6'"),
        ("gpqa --few-shot 3", "0 or 5, got '3'"),
        ("aime25 --few-shot 1", "wants 0, got '1'"),
        ("mmlu --gate --limit 3", "--limit"),
        ("gsm8k --gate", "--limit N"),
        ("mmlu --limit 0.5", "--limit wants a whole number above 0, got '0.5'"),
        ("mmlu --data /no/such/folder", "/no/such/folder"),
        *((f"{name} --data {SCRIPTS}", "README.md") for name in ("mmlu", "gsm8k")),
        (f"gpqa --data {SCRIPTS}", "gpqa_diamond.csv"),
    ],
)
def test_a_wrong_option_is_refused_by_name(options: str, words: str, scripts: Path) -> None:
    done = run("eval.sh", "--model", "m", "--dry-run", *options.split(), scripts=scripts)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_run_that_breaks_off_says_how_to_go_on(scripts: Path, tmp_path: Path) -> None:
    with fake_server({"served": ""}) as url:
        done = run("eval.sh", "gsm8k", "--url", url, "--out", tmp_path / "out", "--", "--no-such-flag", scripts=scripts)
    assert done.returncode == 2
    assert f"{tmp_path}/out" in done.stderr
    assert "--data" in done.stderr
    assert "# GSM8K" not in done.stdout
