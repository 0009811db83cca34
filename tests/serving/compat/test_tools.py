"""Tool calls in whole answers: with or without the server's flags, and when `tool_choice` forces them."""

from __future__ import annotations

import pytest

from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat

pytestmark = pytest.mark.serving

PATCHES = ("harmony-parser", "harmony-channels", "tool-answers", "tools-without-flags")
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}<|call|>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture
def answer(harmony):
    """(content, [(name, arguments)], finish reason) of a whole chat answer."""

    def ask(text: str, **fields) -> tuple:
        engine = FakeEngine(harmony.encode(text, allowed_special="all"))
        choice = chat(engine, tools=[WEATHER], **fields)["choices"][0]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"]["tool_calls"]]
        return choice["message"]["content"], calls, choice["finish_reason"]

    return ask


def test_calls_are_found_without_the_servers_flags(patched, answer):
    expected = [("get_weather", '{"city": "Paris"}')]
    with patched():
        assert answer("<|channel|>analysis<|message|>hm<|end|><|start|>assistant" + CALL, tool_flags=False) == (
            '{"city": "Paris"}',
            [],
            "stop",
        )
    with patched(*PATCHES):
        for flags in (False, True):
            assert answer(CALL, tool_flags=flags) == (None, expected, "tool_calls")


def final(text: str) -> str:
    return f"<|channel|>final <|constrain|>json<|message|>{text}<|return|>"


def test_a_forced_call_that_the_model_makes_by_itself_is_left_as_it_is(patched, answer):
    with patched(*PATCHES):
        for choice in ("required", NAMED):
            assert answer(CALL, tool_choice=choice)[1] == [("get_weather", '{"city": "Paris"}')]
        preamble = '<|channel|>commentary<|message|>{"city": "Rome"}<|end|><|start|>assistant'
        assert answer(preamble + CALL, tool_choice=NAMED)[1] == [("get_weather", '{"city": "Paris"}')]


def test_json_that_nobody_forced_stays_content(patched, answer):
    written = '[{"name": "get_weather", "parameters": {}}]'
    with patched(*PATCHES):
        assert answer(final(written))[:2] == (written, [])
