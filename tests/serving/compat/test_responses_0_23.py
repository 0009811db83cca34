"""vLLM 0.23's /v1/responses, whole and streamed, by its own serving object over an engine of given tokens."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("vllm.entrypoints.openai.chat_completion.stream_harmony", reason="needs vLLM 0.23")

from openai.types.responses import Response
from pydantic import ValidationError
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.engine.protocol import RequestResponseMetadata
from vllm.entrypoints.openai.responses.context import HarmonyContext, StreamingHarmonyContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.sampling_params import RequestOutputKind, SamplingParams

from tests.serving.compat.events import built, sent, shapes
from tests.serving.compat.test_channels import CALL, FOUR, HM, LIST, NEXT, PARIS, TWO_CALLS, Engine, final

pytestmark = pytest.mark.serving

READING = ("harmony-parser", "responses-stream-tokens", "responses-stream-end", "responses-outputs", "responses-items")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now", "parameters": None}
NAMED = {"type": "function", "name": "get_weather"}
ALLOWED = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]}


def serving_of(engine: Engine) -> OpenAIServingResponses:
    return OpenAIServingResponses(
        engine, None, None, request_logger=None, chat_template=None, chat_template_content_format="auto"
    )


def request_of(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest(**{"input": "hi", "store": False, "tools": [WEATHER, NOW]} | fields)


def told(
    generated: Sequence[int], bite: int | None = None, finish: str | None = None, engine: type = Engine, **fields: Any
) -> tuple[Any, list[dict[str, Any]]]:
    """A response and, where it is streamed in bites, its events."""
    serving = serving_of(engine(generated, bite or len(generated), finish))
    request = request_of(stream=bite is not None, **fields)
    context = (StreamingHarmonyContext if bite else HarmonyContext)([], [], frozenset({"get_weather"}))
    params = SamplingParams(output_kind=RequestOutputKind.DELTA if bite else RequestOutputKind.FINAL_ONLY)

    async def turn() -> Any:
        async for each in serving.engine_client.generate({}, params, "id"):
            context.append_output(each)
            yield context

    async def read() -> Any:
        about = RequestResponseMetadata(request_id="r")
        how = (request, params, turn(), context, "gpt-oss", object(), about)
        if bite is None:
            return (await serving.responses_full_generator(*how)).model_dump(mode="json"), []
        events = sent([event async for event in serving.responses_stream_generator(*how)])
        return events[-1]["response"], events

    return asyncio.run(read())


@pytest.mark.parametrize("bite", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "kinds", "status"),
    [
        (HM + FOUR, ["reasoning", "message"], "completed"),
        (HM + NEXT + CALL, ["reasoning", "function_call"], "completed"),
        (TWO_CALLS, ["function_call", "function_call"], "completed"),
        ("<|channel|>commentary<|message|>I look.<|end|>" + NEXT + CALL, ["message", "function_call"], "completed"),
        (HM + FOUR[: FOUR.index("r.")], ["reasoning", "message"], "incomplete"),
        (CALL[: CALL.index("ris")], ["function_call"], "incomplete"),
        ("<|channel|>nonsense<|message|>Four.<|return|>", ["message"], "completed"),
    ],
)
def test_the_events_of_a_stream_build_the_response(
    patched: Any, tokens: Callable, text: str, kinds: list[str], status: str, bite: int
) -> None:
    with patched(*READING):
        whole, _ = told(tokens(text))
        response, events = told(tokens(text), bite)
    assert [item["type"] for item in whole["output"]] == kinds
    assert whole["status"] == response["status"] == status
    assert events[-1]["type"] == f"response.{status}"
    assert shapes(whole["output"]) == shapes(response["output"])
    assert built(events) == response["output"]
    Response.model_validate(response | {"usage": None})  # it has not yet a field of newer clients


def test_stock_tells_other_ids_and_a_completed_response(patched: Any, tokens: Callable) -> None:
    cut = tokens(HM + FOUR[: FOUR.index("r.")])
    with patched("harmony-parser", "responses-stream-tokens", "responses-stream-end"):
        response, events = told(cut, 1)
        assert (events[-1]["type"], response["status"]) == ("response.completed", "incomplete")
        with pytest.raises((AssertionError, ValidationError)):
            built(events)


@pytest.mark.parametrize(
    ("written", "choice"), [(LIST, "required"), (PARIS[1], NAMED)], ids=["required", "a named function"]
)
def test_a_forced_call_is_a_function_call(patched: Any, tokens: Callable, written: str, choice: Any) -> None:
    generated = tokens(HM + final(written))
    with patched(*READING):
        for bite in (None, 2):
            response, _ = told(generated, bite, tool_choice=choice)
            _, call = response["output"]
            assert (call["type"], call["name"], call["arguments"]) == ("function_call", *PARIS)
    with patched("harmony-parser"):
        assert told(generated, tool_choice=choice)[0]["output"][-1]["type"] == "message", "stock"


def test_a_usage_has_numbers_alone(patched: Any, tokens: Callable) -> None:
    """@openai/agents in JavaScript ended every streamed run at a list."""

    def lists(bite: int | None) -> list[str]:
        response, _ = told(tokens(HM + FOUR), bite)
        usage = response["usage"]
        assert usage["output_tokens_details"]["reasoning_tokens"] > 0
        parts = (usage["input_tokens_details"], usage["output_tokens_details"])
        return [name for part in parts for name, value in part.items() if isinstance(value, list)]

    with patched(*READING, "responses-usage"):
        assert lists(None) == lists(1) == []
    with patched(*READING):
        assert len(lists(1)) == 4, "stock"


def test_a_stop_string_is_not_in_the_answer(patched: Any, tokens: Callable) -> None:
    generated = tokens(HM + FOUR[: FOUR.index("<|return|>")])
    with patched(*READING):
        for bite in (None, 1):
            response, _ = told(generated, bite, finish="stop", stop=["ur", "hm"])
            assert [item["content"][0]["text"] for item in response["output"]] == ["hm", "Fo"]
            assert response["status"] == "completed"


def test_a_response_that_generating_ends_with_an_error_says_so(patched: Any, tokens: Callable) -> None:
    class Broken(Engine):
        async def generate(self, *args: Any, **rest: Any) -> Any:
            async for output in super().generate(*args, **rest):
                yield output
                raise RuntimeError("the wheels came off")

    with patched(*READING):
        response, events = told(tokens(HM + FOUR), 3, engine=Broken)
    assert (events[-1]["type"], response["status"]) == ("response.failed", "failed")
    assert response["error"] == {"code": "server_error", "message": "the wheels came off"}
    Response.model_validate(response)


def test_a_background_stream_ends_with_an_incomplete_response(patched: Any) -> None:
    async def read() -> list[str]:
        begun, ended = (types.SimpleNamespace(type=f"response.{name}") for name in ("created", "incomplete"))
        serving = types.SimpleNamespace(event_store={"r": ([begun, ended], asyncio.Event())})
        events = OpenAIServingResponses.responses_background_stream_generator(serving, "r")
        return await asyncio.wait_for(everything(events), 1)

    async def everything(events: Any) -> list[str]:
        return [event.type async for event in events]

    with patched("responses-items"):
        assert asyncio.run(read()) == ["response.created", "response.incomplete"]
    with patched(), pytest.raises(asyncio.TimeoutError):
        asyncio.run(read())


# What a choice of tools makes of a request


def structure(request: Any) -> Any:
    return getattr(request.to_sampling_params(10, {}).structured_outputs, "json", None)


def test_a_forced_call_has_a_grammar(patched: Any) -> None:
    def of_chat(choice: Any, **fields: Any) -> Any:
        tools = [{"type": "function", "function": {k: v for k, v in t.items() if k != "type"}} for t in (WEATHER, NOW)]
        if isinstance(choice, dict):
            choice = {"type": "function", "function": {"name": choice["name"]}}
        messages = [{"role": "user", "content": "hi"}]
        return structure(ChatCompletionRequest(messages=messages, tools=tools, tool_choice=choice, **fields))

    def of_response(choice: Any, **fields: Any) -> Any:
        return structure(request_of(tool_choice=choice, **fields))

    for grammar in (of_chat, of_response):
        with patched("forced-call-schema"):
            assert grammar("auto") is grammar("none") is None
            assert grammar(NAMED) == PARAMETERS
            assert grammar({"type": "function", "name": "now"})["type"] == "object"
            names = [call["properties"]["name"]["enum"] for call in grammar("required")["items"]["anyOf"]]
            assert names == [["get_weather"], ["now"]]
            assert grammar("required", parallel_tool_calls=False)["maxItems"] == 1
        with patched():
            assert grammar("required") is None, "stock"
    with patched("forced-call-schema"):
        assert len(of_response(ALLOWED | {"mode": "required"})["items"]["anyOf"]) == 1
        asked_otherwise = of_chat("required", response_format={"type": "json_object"})
        assert asked_otherwise["type"] == "array"
    for fields in ({"structured_outputs": {"regex": "x"}}, {"guided_regex": "x"}):  # not dropped without a word
        with patched("forced-call-schema", "guided-fields"), pytest.raises(ValueError, match="leave one of them out"):
            of_chat("required", **fields)


def test_tools_that_a_choice_leaves_out_are_not_shown_and_impossible_ones_refused(
    patched: Any, harmony: Any, tokens: Callable
) -> None:
    def shown(**fields: Any) -> str:
        _, (prompt,) = serving_of(Engine(tokens(FOUR), 1))._make_request_with_harmony(request_of(**fields), None)
        return harmony.decode(prompt["prompt_token_ids"])

    with patched("responses-tool-choice", "tool-description"):
        assert all("get_weather" in shown(tool_choice=choice) for choice in ("auto", "required", NAMED))
        assert "functions" not in shown(tool_choice="none")
        assert ("get_weather" in shown(tool_choice=ALLOWED), "now" in shown(tool_choice=ALLOWED)) == (False, True)
        for choice in (ALLOWED | {"tools": [{"type": "function", "name": "nobody"}]}, {"type": "web_search_preview"}):
            with pytest.raises(ValueError, match=r"allowed_tools|tool_choice"):
                shown(tool_choice=choice)
    with patched("tool-description"):
        assert "get_weather" in shown(tool_choice="none"), "stock"
        with pytest.raises(NotImplementedError):
            shown(tool_choice="required")
