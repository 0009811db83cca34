"""tiny_mmlu writes MMLU's layout, the tiny model's prompts, and right answers."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from research import tiny_mmlu
from research.tiny_data import CAPITALS, CHOICE_COT, LARGEST_NUMBER


def read(folder: Path, split: str) -> list[dict]:
    return [json.loads(line) for line in (folder / "all" / f"{split}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny_mmlu") / "mmlu"
    assert tiny_mmlu.main([str(folder), "--questions", "80"]) == 0
    return folder


def test_subjects_have_equal_shares_and_no_question_comes_twice(written: Path) -> None:
    for split, each in (("test", 20), ("dev", 5)):
        rows = read(written, split)
        assert Counter(row["subject"] for row in rows) == dict.fromkeys(tiny_mmlu.SUBJECTS.values(), each)
        assert len({json.dumps(row) for row in rows}) == len(rows)
        assert all(len(row["choices"]) == 4 == len(set(row["choices"])) for row in rows)


def test_the_answers_are_right_and_their_letters_spread(written: Path) -> None:
    counts = Counter(row["answer"] for row in read(written, "test"))
    assert set(counts) == {0, 1, 2, 3}
    assert max(counts.values()) < 40, "a model that always says one letter must not score"
    for row in read(written, "test"):
        right, question = row["choices"][row["answer"]], row["question"].rstrip("?")
        if row["subject"] == "elementary_mathematics":
            assert int(right) == sum(map(int, question.removeprefix("What is ").split(" + ")))
        elif row["subject"] == "high_school_statistics":
            assert int(right) == max(map(int, row["choices"])) <= LARGEST_NUMBER
        elif row["subject"] == "high_school_geography":
            assert right == CAPITALS[question.removeprefix("What is the capital of ")]


def test_no_part_of_the_prompt_is_lost() -> None:
    """A question put into evalscope's prompt again is one that training used."""
    row = next(tiny_mmlu.rows("a seed"))
    choices = "\n".join(f"{letter}) {choice}" for letter, choice in zip("ABCD", row["choices"], strict=True))
    text = CHOICE_COT.format(question=row["question"], choices=choices)
    assert "A,B,C,D. Think step by step before answering.\n\n" + row["question"] + "\n\nA) " in text


def test_an_existing_folder_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert tiny_mmlu.main([str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
