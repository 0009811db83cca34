"""/v1/responses: a stream and a whole response tell the same items, as OpenAI's clients read them."""

from __future__ import annotations

import asyncio

import pytest
from openai.types.responses import Response
from vllm.entrypoints.openai.protocol import ResponsesRequest
from vllm.sampling_params import SamplingParams

from tests.serving.compat.conftest import TELLING
from tests.serving.compat.events import built, sent, shapes
from tests.serving.compat.fake_engine import (
    MODEL,
    WEATHER,
    FakeEngine,
    flat,
    respond,
    responses_serving,
    stream_responses,
)
from tests.serving.compat.test_reading import ANSWER, CALL, NEXT, PREAMBLE, TURNS
from tests.serving.compat.test_streaming import through_the_client

pytestmark = pytest.mark.serving

STOCK = ("harmony-parser", "harmony-channels", "responses-stream-tokens", "responses-stream-end")
THOUGHT = f"<|channel|>analysis<|message|>I need the weather.{NEXT}"
WEATHER = flat(WEATHER)
NOW = {"type": "function", "name": "now"}
NAMED = {"type": "function", "name": "get_weather"}


@pytest.mark.parametrize("bite", [1, 3, 100])
@pytest.mark.parametrize("name", TURNS)
def test_the_events_of_a_stream_build_the_response(patched, tokens, name, bite):
    text, (*_, finish) = TURNS[name]
    status = "incomplete" if finish == "length" else "completed"
    with patched(*TELLING):
        whole = respond(FakeEngine(tokens(text)), tools=[WEATHER])
        events = sent(stream_responses(FakeEngine(tokens(text), bite), tools=[WEATHER]))
    response = events[-1]["response"]
    assert whole["status"] == response["status"] == status
    assert events[-1]["type"] == f"response.{status}"
    assert shapes(whole["output"]) == shapes(response["output"])
    assert built(events) == response["output"]
    Response.model_validate(whole)
    Response.model_validate(response)
    assert {"error", "incomplete_details", "instructions", "metadata", "usage"} <= whole.keys()


def test_stock_streams_no_function_call_and_other_ids(patched, tokens):
    with patched(*STOCK):
        events = sent(stream_responses(FakeEngine(tokens(THOUGHT + CALL)), tools=[WEATHER]))
    kinds = [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"]
    final = events[-1]["response"]["output"]
    assert kinds == ["reasoning"]
    assert [item["type"] for item in final] == ["reasoning", "function_call"]
    ids = {event["item"]["id"] for event in events if event["type"] == "response.output_item.done"}
    assert not ids & {item["id"] for item in final}


def test_a_response_that_generating_ends_with_an_error_says_so(patched, tokens):
    class Broken(FakeEngine):
        async def generate(self, *args, **kwargs):
            async for output in super().generate(*args, **kwargs):
                yield output
                raise RuntimeError("the wheels came off")

    with patched(*STOCK), pytest.raises(RuntimeError):
        stream_responses(Broken(tokens(THOUGHT + ANSWER), 3))  # the connection breaks
    with patched(*TELLING):
        last = sent(stream_responses(Broken(tokens(THOUGHT + ANSWER), 3)))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert last["response"]["error"] == {"code": "server_error", "message": "the wheels came off"}
        Response.model_validate(last["response"])
        assert respond(Broken(tokens(THOUGHT + ANSWER)))["error"]["code"] == 500
    with patched(*STOCK):
        assert respond(Broken(tokens(THOUGHT + ANSWER)))["error"]["code"] == 400


@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}])
def test_a_forced_call_is_a_function_call(patched, tokens, choice):
    """test_turn.py has what a call is read from."""
    written = '{"city": "Rome"}' if choice is NAMED else '[{"name": "get_weather", "parameters": {"city": "Rome"}}]'
    engine = FakeEngine(tokens(f"{THOUGHT}<|channel|>final <|constrain|>json<|message|>{written}<|return|>"), 2)
    fields = {"tools": [WEATHER, NOW], "tool_choice": choice}
    with patched(*STOCK):
        assert "'auto' tool_choice" in respond(engine, **fields)["error"]["message"]
    with patched(*TELLING):
        for response in (respond(engine, **fields), sent(stream_responses(engine, **fields))[-1]["response"]):
            reasoning, made = response["output"]
            assert (reasoning["type"], made["type"]) == ("reasoning", "function_call")
            assert (made["name"], made["arguments"]) == ("get_weather", '{"city": "Rome"}')
            assert len(response["tools"]) == 2  # the response shows the request's own


def grammar(**fields) -> SamplingParams:
    request = ResponsesRequest.model_validate({"model": MODEL, "input": "Hello", "tools": [WEATHER, NOW]} | fields)
    return request.to_sampling_params(10, {})


def test_a_forced_call_has_a_grammar(patched):
    with patched("forced-call-schema"):
        assert grammar().structured_outputs is None
        assert grammar(tool_choice="none").structured_outputs is None
        assert grammar(tool_choice=NAMED).structured_outputs.json == WEATHER["parameters"]
        assert grammar(tool_choice={"type": "function", "name": "now"}).structured_outputs.json["type"] == "object"
        names = [
            call["properties"]["name"]["enum"]
            for call in grammar(tool_choice="required").structured_outputs.json["items"]["anyOf"]
        ]
        assert names == [["get_weather"], ["now"]]
        assert "maxItems" not in grammar(tool_choice="required").structured_outputs.json
        one = grammar(tool_choice="required", parallel_tool_calls=False).structured_outputs.json
        assert one["maxItems"] == 1
        allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "now"}]}
        assert len(grammar(tool_choice=allowed).structured_outputs.json["items"]["anyOf"]) == 1


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "nobody"},
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "nobody"}]},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_label": "x"},
    ],
)
def test_a_choice_that_cannot_be_is_the_clients_error(patched, tokens, choice):
    with patched(*TELLING):
        assert respond(FakeEngine(tokens(ANSWER)), tools=[WEATHER], tool_choice=choice)["error"]["code"] == 400
        assert respond(FakeEngine(tokens(ANSWER)), tools=[], tool_choice="required")["error"]["code"] == 400


def test_tool_choice_none_and_allowed_tools_hide_tools_from_the_model(patched, harmony, tokens):
    def prompt(**fields) -> str:
        engine = FakeEngine(tokens(ANSWER))
        assert respond(engine, tools=[WEATHER, NOW], **fields)["status"] == "completed"
        return harmony.decode(engine.prompts[0])

    with patched(*TELLING, "responses-prompt"):
        assert "get_weather" in prompt()
        assert "functions" not in prompt(tool_choice="none")
        allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}
        assert "get_weather" not in prompt(tool_choice=allowed)
        assert "now" in prompt(tool_choice=allowed)


def test_a_missing_response_says_how_responses_are_stored(patched, tokens):
    async def ask(serving) -> list:
        request = ResponsesRequest(model=MODEL, input="Hello", previous_response_id="resp_1")
        return [
            await serving.create_responses(request),
            await serving.retrieve_responses("resp_1", None, False),
            await serving.cancel_responses("resp_1"),
        ]

    with patched("responses-store"):
        answers = asyncio.run(ask(responses_serving(FakeEngine(tokens(ANSWER)))))
    for answer in answers:
        assert answer.error.code == 404
        assert "VLLM_ENABLE_RESPONSES_API_STORE=1" in answer.error.message
    with patched():
        assert "STORE" not in asyncio.run(ask(responses_serving(FakeEngine([1]))))[0].error.message


@pytest.mark.parametrize("text", [THOUGHT + CALL[:-12], THOUGHT + ANSWER])
def test_a_stored_stream_ends_whatever_became_of_it(patched, monkeypatch, tokens, text):
    """In the background vLLM waits for `response.completed` alone."""
    monkeypatch.setenv("VLLM_ENABLE_RESPONSES_API_STORE", "1")

    async def collect() -> list:
        serving = responses_serving(FakeEngine(tokens(text)))
        request = ResponsesRequest(model=MODEL, input="Hello", stream=True, background=True)
        events = [event async for event in await serving.create_responses(request)]
        stored = await serving.retrieve_responses(request.request_id, None, False)
        assert stored.status == events[-1].response.status
        return events

    with patched(*TELLING):
        events = asyncio.run(asyncio.wait_for(collect(), 10))
    assert events[-1].type in ("response.completed", "response.incomplete")


def test_openais_client_reads_a_streamed_call(patched, tokens):
    with patched(*TELLING):
        through_the_client(stream_responses(FakeEngine(tokens(THOUGHT + PREAMBLE + CALL), 4), tools=[WEATHER]))


@pytest.mark.parametrize("field", ["parallel_tool_calls", "background", "truncation"])
def test_a_field_that_may_be_null_is_taken_as_its_default(patched, tokens, field):
    with patched(*TELLING):
        assert respond(FakeEngine(tokens(ANSWER)), **{field: None})["error"] is not None
    with patched(*TELLING, "responses-nulls"):
        assert respond(FakeEngine(tokens(ANSWER)), **{field: None})["status"] == "completed"
        assert stream_responses(FakeEngine(tokens(ANSWER)), **{field: None})[-1].type == "response.completed"
