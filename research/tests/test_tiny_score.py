"""The judge separates right from wrong answers in any wording."""

from __future__ import annotations

from dataclasses import replace

import pytest

from research.tiny_data import evaluation_set
from research.tiny_score import Example, Score, tally
from research.tiny_text import Reply, render_reply


def said(text: str) -> str:
    return render_reply(Reply("I think.", text))


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return evaluation_set(0, 600)


def test_right_reply_counts_and_another_examples_reply_does_not(examples):
    assert all(example.is_right(example.completion()) for example in examples)
    for example in examples:
        other = next(e for e in examples if e.task == example.task and e.answer != example.answer)
        assert not example.is_right(other.completion()), example
        assert not example.is_right("")
        assert not example.is_right("<|channel|>analysis<|message|>" + example.answer)


def test_last_letter_counts_in_a_choice():
    example = Example("choice", (), Reply(), "B")
    assert example.is_right(said("The answer is 7.\n\nANSWER: B"))
    assert example.is_right(said("ANSWER: A? No.\nANSWER: B"))
    assert not example.is_right(said("ANSWER: Both"))
    assert not example.is_right(said("B"))


def test_call_needs_the_right_function_and_arguments():
    example = Example("call", (), Reply("", "", "get_weather", '{"city":"Paris"}'), '{"city":"Paris"}')
    assert example.is_right_reply("", "get_weather", '{ "city" : "Paris" }')
    assert not example.is_right_reply("", "get_time", '{"city":"Paris"}')
    assert not example.is_right_reply("", "get_weather", '{"city":"Rome"}')
    assert not example.is_right_reply("", "get_weather", "{city")
    assert not example.is_right_reply("Paris", None, None)


def test_numbers_are_compared_whole():
    example = Example("sum", (), Reply(), "7")
    assert example.is_right(said("Anna, 3 + 4 = 7."))
    assert not example.is_right(said("3 + 14 = 17."))
    assert not example.is_right(said("7 + 1 = 8."))
    recall = replace(example, task="recall")
    assert recall.is_right(said("The red code is 7, not 8."))  # of a sum the last number counts, elsewhere the first
    assert not recall.is_right(said("The red code is 77."))
    assert not recall.is_right(said("The red code is 8, not 7."))


def test_score_counts_by_task(examples):
    score = tally(examples, [example.task != "sum" for example in examples])
    assert score.accuracy("sum") == 0.0
    assert score.accuracy("choice") == 1.0
    assert score.overall == pytest.approx(5 / 6)


def test_every_task_counts_alike_however_many_examples_it_has():
    score = Score(right={"sum": 1, "choice": 0}, total={"sum": 1, "choice": 3})
    assert score.overall == 0.5
    assert str(score) == "50.0 % (sum 100.0 choice 0.0)"
