"""mmlu.sh asks what the Ascend article asked, resumes where it stopped, and refuses in words."""

from __future__ import annotations

import json
import re
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


@pytest.fixture
def scripts(tmp_path: Path) -> Path:
    return beside_a_fake_evalscope(tmp_path / "repository", status=1)


def dry(scripts: Path, *options: str | Path) -> tuple[dict[str, str], list[str]]:
    arguments = ("--model", "gpt-oss-20b", "--dry-run", *options)
    return printed_command(run("mmlu.sh", *arguments, scripts=scripts))


def test_the_defaults_are_the_articles_and_the_decoding_is_pinned(scripts: Path) -> None:
    variables, words = dry(scripts)
    assert variables == {}
    article = ["eval", "--model", "gpt-oss-20b", "--api-url", "http://127.0.0.1:8085/v1", "--api-key", "EMPTY"]
    assert words[1 : len(article) + 1] == article
    assert (following(words, "--datasets"), following(words, "--eval-batch-size")) == ("mmlu", "16")
    assert json.loads(following(words, "--dataset-args")) == {"mmlu": {"few_shot_num": 5}}
    generation = json.loads(following(words, "--generation-config"))
    assert generation == {"temperature": 0, "reasoning_effort": "medium", "timeout": 3600}
    assert following(words, "--work-dir") == "outputs/mmlu-gpt-oss-20b-medium"
    assert "--limit" not in words
    assert "--use-cache" not in words


def test_the_gate_has_exactly_a_thousand_questions_of_all_subjects(scripts: Path) -> None:
    _, words = dry(scripts, "--gate")
    part = float(following(words, "--limit"))
    counts = [int(size * part) for size in SIZES]  # evalscope's rule; tests/scripts/test_evalscope.py asks evalscope
    assert (len(SIZES), sum(SIZES), sum(counts), min(counts)) == (57, 14_042, 1000, 7)
    assert json.loads(following(words, "--dataset-args"))["mmlu"]["shuffle"] is True
    assert following(words, "--seed") == "42"
    assert following(words, "--work-dir").endswith("-gate")


def test_options_reach_evalscope(scripts: Path, tmp_path: Path) -> None:
    data = tmp_path / "mmlu"
    data.mkdir()
    (data / "README.md").touch()
    options = ("--effort", "high", "--batch", "4", "--few-shot", "0", "--max-tokens", "900", "--limit", "3")
    variables, words = dry(scripts, *options, "--data", data, "--", "--debug")
    assert variables == {"HF_HUB_OFFLINE": "1"}
    assert json.loads(following(words, "--dataset-args")) == {"mmlu": {"few_shot_num": 0, "local_path": str(data)}}
    generation = json.loads(following(words, "--generation-config"))
    assert (generation["reasoning_effort"], generation["max_tokens"]) == ("high", 900)
    assert (following(words, "--eval-batch-size"), following(words, "--limit")) == ("4", "3")
    assert words[-1] == "--debug"


def test_a_work_directory_with_answers_is_resumed(scripts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "configs").mkdir(parents=True)
    (out / "configs" / "task_config.yaml").touch()
    _, words = dry(scripts, "--out", out)
    assert "--use-cache" not in words, "nothing is answered: after a failed download --data may be added"
    (out / "predictions" / "gpt-oss-20b").mkdir(parents=True)
    (out / "predictions" / "gpt-oss-20b" / "mmlu_anatomy.jsonl").touch()
    _, words = dry(scripts, "--out", out)
    assert following(words, "--use-cache") == following(words, "--work-dir") == str(out)


def test_runs_that_ask_other_things_get_other_folders(scripts: Path) -> None:
    variants = ((), ("--gate",), ("--limit", "2"), ("--effort", "low"), ("--effort", "low", "--gate"))
    folders = [following(dry(scripts, *options)[1], "--work-dir") for options in variants]
    assert len(set(folders)) == len(variants)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--effort", "extreme"), "low, medium or high, got 'extreme'"),
        (("--few-shot", "6"), "--few-shot wants 0 to 5, got '6'"),
        (("--gate", "--limit", "3"), "exclude each other"),
        (("--limit", "0.5"), "--limit wants a whole number above 0, got '0.5'"),
        (("--data", "/no/such/folder"), "--data /no/such/folder is not a folder"),
        (("--data", str(SCRIPTS)), "has no README.md: expected the folder of cais/mmlu"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_words(options: tuple[str, ...], words: str, scripts: Path) -> None:
    done = run("mmlu.sh", "--model", "m", "--dry-run", *options, scripts=scripts)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_run_that_breaks_off_says_how_to_go_on(scripts: Path, tmp_path: Path) -> None:
    with fake_server({"served": ""}) as url:
        done = run("mmlu.sh", "--url", url, "--out", tmp_path / "out", "--", "--no-such-flag", scripts=scripts)
    assert done.returncode == 2
    assert re.search(r"what is answered is kept in \S+/out, and the same command\s+goes on", done.stderr)
    assert "name it with --data" in done.stderr
    assert "# MMLU" not in done.stdout
