"""Streams: no text may be lost, whatever number of tokens the engine hands over at a time."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from openai_harmony import Author, Message, Role
from vllm.entrypoints.context import StreamingHarmonyContext
from vllm.entrypoints.openai.protocol import ChatCompletionRequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from npu_gptoss.serving.compat.streaming import OneTokenAtATime
from tests.serving.compat.conftest import TELLING
from tests.serving.compat.fake_engine import (
    MODEL,
    WEATHER,
    FakeEngine,
    chat_serving,
    respond,
    stream_chat,
    stream_responses,
    told,
)
from tests.serving.compat.test_reading import TURNS

pytestmark = pytest.mark.serving

TOKENS = ("harmony-parser", "chat-stream-tokens")
RESPONSES = ("harmony-parser", "harmony-channels", "responses-stream-tokens", "responses-stream-end")
BITES = (1, 2, 3, 5, 100)

ANSWER = (
    "<|channel|>analysis<|message|>The user greets me, so I greet back.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>Hello there! 🜁 How are you?<|return|>"
)


def test_a_chat_stream_loses_no_text_when_several_tokens_come_at_once(patched, tokens):
    whole = {"content": "Hello there! 🜁 How are you?", "reasoning": "The user greets me, so I greet back."}
    with patched():
        assert told(stream_chat(FakeEngine(tokens(ANSWER)))).items() >= whole.items()  # one at a time all is well
        stock = told(stream_chat(FakeEngine(tokens(ANSWER), bite=2)))
        assert len(stock["content"]) < len(whole["content"])
        assert told(stream_chat(FakeEngine(tokens(ANSWER), bite=100)))["content"] == ""
    with patched(*TOKENS):
        one_by_one = stream_chat(FakeEngine(tokens(ANSWER)))
        assert told(one_by_one).items() >= whole.items()
        for bite in BITES:
            chunks = stream_chat(FakeEngine(tokens(ANSWER), bite))
            assert [chunk["choices"] for chunk in chunks] == [chunk["choices"] for chunk in one_by_one]


def told_of(name: str, tokens, **options) -> dict:
    return told(stream_chat(FakeEngine(tokens(TURNS[name][0]), **options), tools=[WEATHER]))


def test_stock_streams_drop_calls_and_preambles_and_break_where_a_call_is_cut_off(patched, tokens):
    """test_reading.py shows what the repaired stream tells of these turns."""
    with patched():
        assert told_of("call", tokens, bite=100)["calls"] == []
        assert told_of("cut in a call", tokens)["error"] is not None
    with patched(*TOKENS):
        assert told_of("call", tokens, bite=100)["calls"] == TURNS["call"][1][2]
        assert told_of("preamble and call", tokens)["content"] == ""


def test_reasoning_can_be_left_out_of_a_stream(patched, tokens):
    with patched(*TELLING):
        answer = told(stream_chat(FakeEngine(tokens(ANSWER), bite=3), include_reasoning=False))
    assert (answer["content"], answer["reasoning"]) == ("Hello there! 🜁 How are you?", "")


def test_an_output_without_tokens_repeats_nothing(patched, tokens):
    cut = tokens("<|channel|>final<|message|>cut off")
    with patched():
        assert told(stream_chat(FakeEngine(cut, finish="abort", empty_end=True)))["content"] == "cut off off"
    with patched(*TELLING):
        answer = told(stream_chat(FakeEngine(cut, finish="abort", empty_end=True)))
    assert (answer["content"], answer["finish"]) == ("cut off", "abort")


def test_a_client_that_goes_away_ends_the_generation(patched, tokens):
    engine = FakeEngine(tokens(ANSWER), bite=4)

    async def leave() -> None:
        request = ChatCompletionRequest(model=MODEL, stream=True, messages=[{"role": "user", "content": "Hello"}])
        answer = await chat_serving(engine).create_chat_completion(request)
        await anext(answer)
        await anext(answer)
        await answer.aclose()
        await asyncio.sleep(0.01)

    with patched(*TELLING):
        asyncio.run(leave())
    assert engine.closed


def test_taking_outputs_apart_hands_the_end_on_at_once(tokens):
    engine = FakeEngine(tokens(ANSWER), bite=4)

    async def leave() -> bool:
        parameters = SamplingParams(output_kind=RequestOutputKind.DELTA)
        outputs = OneTokenAtATime(engine).generate({"prompt_token_ids": [1]}, parameters, "r")
        await anext(outputs)
        await outputs.aclose()
        return engine.closed

    assert asyncio.run(leave())


def test_other_models_keep_their_engine_client(patched):
    with patched(*TELLING):
        engine = FakeEngine([1])
        assert chat_serving(engine, tool_flags=False, model_type="llama").engine_client is engine


def deltas(events: list, kind: str) -> str:
    return "".join(event.delta for event in events if event.type == kind)


def test_a_response_stream_loses_no_text_when_several_tokens_come_at_once(patched, tokens):
    with patched():
        stock = stream_responses(FakeEngine(tokens(ANSWER), bite=3))
        assert len(deltas(stock, "response.output_text.delta")) < len("Hello there! 🜁 How are you?")
    with patched(*RESPONSES):
        one_by_one = stream_responses(FakeEngine(tokens(ANSWER)))
        expected = [event.type for event in one_by_one]
        for bite in BITES:
            events = stream_responses(FakeEngine(tokens(ANSWER), bite))
            assert deltas(events, "response.output_text.delta") == "Hello there! 🜁 How are you?"
            assert deltas(events, "response.reasoning_text.delta") == "The user greets me, so I greet back."
            assert [event.type for event in events] == expected
            assert events[-1].response.output_text == "Hello there! 🜁 How are you?"
            assert events[-1].response.status == "completed"
            assert events[-1].response.usage == one_by_one[-1].response.usage


def test_a_response_stream_that_is_cut_off_is_incomplete(patched, tokens):
    cut = tokens(ANSWER)[:-3]
    with patched():
        assert stream_responses(FakeEngine(cut))[-1].response.status == "completed"
    with patched(*RESPONSES):
        assert stream_responses(FakeEngine(cut))[-1].response.status == "incomplete"
        assert respond(FakeEngine(cut))["status"] == "incomplete"


def test_a_response_stream_survives_an_output_without_tokens(patched, tokens):
    cut = tokens("<|channel|>final<|message|>cut off")
    with patched(), pytest.raises(UnboundLocalError):
        stream_responses(FakeEngine(cut, finish="abort", empty_end=True))
    with patched(*RESPONSES):
        events = stream_responses(FakeEngine(cut, finish="abort", empty_end=True))
    assert deltas(events, "response.output_text.delta") == "cut off"
    assert events[-1].response.status == "cancelled"


def test_a_response_stream_goes_on_after_a_tool_of_the_server(patched, harmony, tokens):
    """What the server's own browser answers is fed to the parser between two turns of the model."""

    def context_after(*parts: str | Message) -> StreamingHarmonyContext:
        context = StreamingHarmonyContext([Message.from_role_and_content(Role.USER, "Hello")], ["browser"])
        for part in parts:
            if isinstance(part, Message):
                context.append_output([part])
                context.messages.append(part)
                context.render_for_completion()
                continue
            for token in tokens(part):
                completion = CompletionOutput(0, "", [token], None, None)
                context.append_output(RequestOutput("r", None, [1], None, [completion], False))
        return context

    result = Message.from_author_and_content(Author.new(Role.TOOL, "browser.search"), "a page").with_channel("analysis")
    turns = (
        "<|channel|>analysis to=browser.search json<|message|>{}<|call|>",
        result.with_recipient("assistant"),
        "<|channel|>final<|message|>Found.<|return|>",
    )
    for patches in ((), RESPONSES):
        with patched(*patches):
            texts = [(part.channel, part.content[0].text) for part in context_after(*turns).parser.messages]
        assert texts == [("analysis", "{}"), ("analysis", "a page"), ("final", "Found.")]


def through_the_client(events: list) -> list[str]:
    """The texts that OpenAI's own client puts together while it reads the stream."""
    body = "".join(f"event: {event.type}\ndata: {event.model_dump_json(by_alias=True)}\n\n" for event in events)
    answer = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body.encode())
    transport = httpx.MockTransport(lambda request: answer)
    client = openai.OpenAI(base_url="http://server/v1", api_key="-", http_client=httpx.Client(transport=transport))
    with client.responses.stream(model=MODEL, input="Hello") as stream:
        return [event.snapshot for event in stream if event.type == "response.output_text.delta"]


def test_openais_client_can_put_a_response_together(patched, tokens):
    with patched(*RESPONSES), pytest.raises(IndexError):
        through_the_client(stream_responses(FakeEngine(tokens(ANSWER))))
    with patched(*TELLING):
        events = stream_responses(FakeEngine(tokens(ANSWER), bite=4))
        assert through_the_client(events)[-1] == "Hello there! 🜁 How are you?"
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [(event.output_index, event.item.type) for event in done] == [(0, "reasoning"), (1, "message")]
