"""The `anthropic` package, as its own pages use it. It adds `/v1` itself."""

from __future__ import annotations

import anthropic
from anthropic import beta_tool
from runner import ANSWER, PARAMETERS, SUM, WEATHER, Found, equal

TOOL = {"name": "get_weather", "description": "Get the weather", "input_schema": PARAMETERS}


def options(model, text, more):
    messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
    greedy = {"temperature": 0}  # a field that this SDK no longer has
    return {"model": model, "max_tokens": 200, "messages": messages, "extra_body": greedy, **more}


def client(url):
    return anthropic.Anthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)


def ask(url, served, text=SUM, **more):
    return client(url).messages.create(**options(served, text, more))


def kinds(message):
    return [block.type for block in message.content]


def case_it_thinks_and_answers(url, model):
    message = ask(url, model)
    equal(kinds(message), ["thinking", "text"])
    equal((message.content[1].text, message.stop_reason, message.role), (ANSWER, "end_turn", "assistant"))
    assert message.content[0].thinking
    assert message.content[0].signature
    assert message.usage.output_tokens > 5


def case_a_stream_is_the_whole_answer(url, model):
    whole = ask(url, model)
    with client(url).messages.stream(**options(model, SUM, {})) as stream:
        texts = list(stream.text_stream)
        streamed = stream.get_final_message()
    equal("".join(texts), ANSWER)
    assert len(texts) > 2
    equal([b.to_dict() for b in streamed.content], [b.to_dict() for b in whole.content])
    equal((streamed.stop_reason, streamed.usage.output_tokens), (whole.stop_reason, whole.usage.output_tokens))


async def case_the_asynchronous_client_streams_events(url, model):
    api = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key="none", max_retries=0, timeout=120)
    events = [event async for event in await api.messages.create(**options(model, SUM, {"stream": True}))]
    equal((events[0].type, events[-1].type), ("message_start", "message_stop"))
    texts = [event.delta.text for event in events if getattr(getattr(event, "delta", None), "type", "") == "text_delta"]
    equal("".join(texts), ANSWER)


def case_a_tool_is_called_and_answered(url, model):
    asked = ask(url, model, WEATHER, tools=[TOOL])
    (call,) = (block for block in asked.content if block.type == "tool_use")
    equal((asked.stop_reason, call.name, call.input), ("tool_use", "get_weather", {"city": "Paris"}))
    messages = [{"role": "user", "content": WEATHER}, {"role": "assistant", "content": asked.content}]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}
    messages.append({"role": "user", "content": [result]})
    answer = ask(url, model, messages, tools=[TOOL])
    equal((answer.content[-1].type, answer.stop_reason), ("text", "end_turn"))


def case_a_call_is_streamed(url, model):
    with client(url).messages.stream(**options(model, WEATHER, {"tools": [TOOL]})) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        (call,) = (block for block in stream.get_final_message().content if block.type == "tool_use")
    equal(call.input, {"city": "Paris"})
    assert len(parts) > 2


def case_the_tool_runner_ends_with_an_answer(url, model):
    @beta_tool
    def get_weather(city: str) -> str:
        """Get the weather

        Args:
            city: a city
        """
        return f"21 degrees in {city}"

    more = {"tools": [get_weather], "max_iterations": 3}
    runner = client(url).beta.messages.tool_runner(**options(model, WEATHER, more))
    messages = list(runner)
    equal([message.stop_reason for message in messages], ["tool_use", "end_turn"])


def case_a_forced_tool_is_called(url, model):
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
        message = ask(url, model, WEATHER, tools=[TOOL], tool_choice=choice)
        equal((message.stop_reason, message.content[-1].name), ("tool_use", "get_weather"), choice)
        assert isinstance(message.content[-1].input["city"], str)


def case_thinking_is_left_out_where_it_is_disabled(url, model):
    equal(kinds(ask(url, model, thinking={"type": "disabled"})), ["text"])
    assert "thinking" in kinds(ask(url, model, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048))


def case_structured_output_is_parsed(url, model):
    message = client(url).messages.parse(**options(model, SUM, {"output_format": Found}))
    assert isinstance(message.parsed_output, Found)


def case_tokens_are_counted_as_they_are_read(url, model):
    more = {"system": "Be brief.", "tools": [TOOL], "messages": [{"role": "user", "content": SUM}]}
    counted = client(url).messages.count_tokens(model=model, **more).input_tokens
    usage = ask(url, model, **more).usage
    equal(counted, usage.input_tokens + usage.cache_read_input_tokens)


def case_mistakes_are_errors_of_the_sdk(url, model):
    for more, error, words in (
        ({"model": "nobody"}, anthropic.NotFoundError, "nobody"),
        ({"extra_body": {"temperature": -1}}, anthropic.BadRequestError, "temperature"),
        ({"tools": [{"name": "f"}]}, anthropic.BadRequestError, "tools[0].input_schema"),
        ({"messages": [{"role": "user", "content": "a b " * 20000}]}, anthropic.BadRequestError, "prompt is too long"),
    ):
        body = refused(error, url, model, **more)
        equal(body["type"], "error")
        assert words in body["error"]["message"], body


def refused(error, url, served, **more):
    """The body of the SDK's error for a request."""
    try:
        ask(url, served, **more)
    except error as raised:
        return raised.body
    raise AssertionError(f"{more} was taken")
