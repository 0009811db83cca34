"""`litellm`, as a library: its proxy sends the same."""

from __future__ import annotations

import json

import litellm
from runner import ANSWER, FUNCTION, SUM, WEATHER, Found, equal

litellm.suppress_debug_info = True
litellm.telemetry = False
TOOLS = [{"type": "function", "function": FUNCTION}]
SCHEMA = Found.model_json_schema() | {"additionalProperties": False}


def ask(url, model, text=SUM, **options):
    return litellm.completion(
        model=f"openai/{model}",
        api_base=url,
        api_key="none",
        messages=[{"role": "user", "content": text}],
        **{"temperature": 0, "max_tokens": 200, "num_retries": 0, **options},
    )


def case_it_answers_and_thinks(url, model):
    message = ask(url, model).choices[0].message
    equal(message.content, ANSWER)
    assert message.reasoning_content


def case_it_streams(url, model):
    chunks = list(ask(url, model, stream=True))
    equal("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), ANSWER)
    assert any(getattr(c.choices[0].delta, "reasoning_content", None) for c in chunks if c.choices)


def case_a_tool_is_called_whole_and_streamed(url, model):
    options = {"text": WEATHER, "tools": TOOLS}
    (call,) = ask(url, model, **options).choices[0].message.tool_calls
    equal(json.loads(call.function.arguments), {"city": "Paris"})
    chunks = list(ask(url, model, stream=True, **options))
    again = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    equal([json.loads(one.function.arguments) for one in again], [{"city": "Paris"}])


def case_a_forced_tool_is_called(url, model):
    options = {"text": WEATHER, "tools": TOOLS, "tool_choice": "required"}
    (call,) = ask(url, model, **options).choices[0].message.tool_calls
    equal(json.loads(call.function.arguments), {"city": "Paris"})


def case_structured_output_follows_the_schema(url, model):
    form = {"type": "json_schema", "json_schema": {"name": "found", "schema": SCHEMA, "strict": True}}
    equal(set(json.loads(ask(url, model, response_format=form).choices[0].message.content)), {"season", "even"})


def responses(url, model, text, **options):
    settings = {"api_base": url, "api_key": "none", "temperature": 0, "max_output_tokens": 200, **options}
    return litellm.responses(model=f"openai/{model}", input=text, **settings)


def case_responses_answer(url, model):
    answer = responses(url, model, SUM)
    said = [part.text for item in answer.output if item.type == "message" for part in item.content]
    assert said == [ANSWER]


def case_responses_stream_a_call(url, model):
    tools = [{"type": "function", **FUNCTION}]
    events = list(responses(url, model, WEATHER, tools=tools, stream=True))
    wanted = "response.function_call_arguments.delta"
    deltas = [e.delta for e in events if str(getattr(e.type, "value", e.type)) == wanted]
    equal(json.loads("".join(deltas)), {"city": "Paris"})


def case_an_overlong_prompt_is_recognised(url, model):
    """litellm raises an own error, on which a router falls back to a model with more context."""
    try:
        ask(url, model, "word " * 9000)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("it was taken")
