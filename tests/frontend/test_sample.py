"""Samples of an answer: their ends, and what the engine tells about them."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.frontend import chat
from npu_gptoss.frontend.engine import Piece, Step
from tests.frontend.conftest import MESSAGES, Script, run
from tests.frontend.turns import CALL, FOUR, THOUGHT, WEATHER, final


@pytest.mark.parametrize("bite", [None, 1, 100])
@pytest.mark.parametrize(
    ("text", "finish", "stop", "ends"),
    [
        (THOUGHT + FOUR, None, ["ur"], ("stop", "ur")),
        ("Four.", "length", ["ur"], ("stop", "ur")),  # without a header it is read at its end
        (THOUGHT + FOUR, None, ["five"], ("stop", None)),
        (final("Fo")[:-10], "length", ["ur"], ("length", None)),
    ],
)
def test_stop_string_that_ended_a_sample_is_not_named(ask, bite, text, finish, stop, ends):
    got = ask(text, bite, finish, stop=stop)
    last = got if bite is None else json.loads(got[-1].removeprefix("data: "))
    (choice,) = last["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ends


def answer_of(encoder: Any, log: Any = None, **fields: Any) -> chat.Answer:
    request = chat.read({"messages": MESSAGES} | fields)
    facts = chat.Facts("c", "m", 20, cached_details=True, log=log)
    return chat.Answer(request, facts, lambda: request.asked.turn(encoder))


def test_engine_goes_on_when_one_of_two_samples_met_a_stop_string(encoder, tokens):
    class Two(Script):
        async def steps(self):
            yield Step([Piece(1, tokens(final("4")), "stop")])
            async for step in super().steps():
                yield step

    script = Two(tokens(THOUGHT + FOUR + " and so on"), 1)
    whole = run(answer_of(encoder, n=2, stop=["ur"]), script, whole=True)
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["Fo", "4"]
    assert not script.ended, "the engine would write up to max_tokens"


def test_later_step_hides_what_the_engine_told_before(encoder, tokens):
    class Told(Script):
        async def steps(self):
            yield Step([Piece(0, tokens(THOUGHT))], 16, {"prompt_logprobs": [None]})
            yield Step([Piece(0, tokens(FOUR), "stop")], 0, {"metrics": {}})
            self.closed = True

    whole = run(answer_of(encoder), Told([], 1), whole=True)
    assert (whole["prompt_logprobs"], whole["metrics"]) == ([None], {})
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


@pytest.mark.parametrize(("text", "finish"), [(CALL, "tool_calls"), (CALL[: CALL.index("ris")], "length")])
def test_log_says_that_a_cut_call_was_made(encoder, tokens, text, finish):
    said: list[Any] = []
    answer = answer_of(encoder, lambda *words: said.append(words), tools=[WEATHER])
    run(answer, Script(tokens(text), 100), whole=True)
    assert said == [('{"city":"Paris"}'[: 11 if finish == "length" else None], None, finish)]
