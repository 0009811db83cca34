"""The labelled conversations are seeded and balanced, and their labels are right."""

from __future__ import annotations

from collections import Counter

import pytest

from research.tiny_data import TASKS, evaluation_set
from research.tiny_score import Example


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return evaluation_set(0, 600)


def test_evaluation_set_is_seeded_and_balanced(examples):
    assert evaluation_set(0, 600) == examples
    assert evaluation_set(1, 600) != examples
    assert Counter(example.task for example in examples) == dict.fromkeys(TASKS, 100)


def test_labels_follow_from_the_questions(examples):
    for example in examples:
        question = example.messages[-1]["content"]
        if example.task == "choice":
            options = dict(line.split(") ", 1) for line in question.splitlines() if line[1:3] == ") ")
            assert list(options) == list("ABCD")
            assert len(set(options.values())) == 4
            assert (
                f"The answer is {options[example.answer]}, which is option {example.answer}." in example.reply.analysis
            )
            if example.kind == "largest":
                assert int(options[example.answer]) == max(map(int, options.values()))
        if example.task == "recall":
            asked = question.rstrip("?.").split()[-2]
            codes = [part.split(".")[0] for part in question.split(f"The {asked} code is ")[1:]]
            wanted = "" if not codes else codes[0] if example.kind == "first" else codes[-1]
            assert (wanted or f"No {asked} code was given.") in example.reply.content
            assert (example.kind == "absent") == (not codes)
        if example.task == "result":
            assert example.answer in question


def test_old_facts_lie_outside_the_window(examples):
    """A replaced fact must be 128 tokens before the question; each word and full stop is at least a token."""
    updated = [e for e in examples if e.kind in ("updated", "first")]
    assert len(updated) > 20
    for example in updated:
        question = example.messages[-1]["content"]
        asked = question.rstrip("?.").split()[-2]
        after_first = question.split(f"The {asked} code is ")[1]
        assert len(after_first.split()) + after_first.count(".") > 128
