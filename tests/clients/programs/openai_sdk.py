"""The `openai` package, as its own pages use it."""

from __future__ import annotations

import json

from openai import OpenAI
from runner import ANSWER, FUNCTION, SUM, WEATHER, Found, equal

TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", **FUNCTION}]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)


def chat(url, model, text=SUM, **options):
    options = {"temperature": 0, "max_tokens": 200, **options}
    messages = options.pop("messages", [{"role": "user", "content": text}])
    return client(url).chat.completions.create(model=model, messages=messages, **options)


def respond(url, model, text=SUM, **options):
    return client(url).responses.create(
        model=model, input=text, **{"temperature": 0, "max_output_tokens": 200, **options}
    )


def joined(chunks, name):
    return "".join(getattr(choice.delta, name, None) or "" for chunk in chunks for choice in chunk.choices)


def case_chat_answers_with_both_names_of_reasoning(url, model):
    message = chat(url, model).choices[0].message
    equal(message.content, ANSWER)
    assert message.reasoning == message.reasoning_content
    assert message.reasoning


def case_a_stream_is_the_whole_answer(url, model):
    whole = chat(url, model).choices[0].message
    chunks = list(chat(url, model, stream=True, stream_options={"include_usage": True}))
    assert joined(chunks, "content") == whole.content
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content") == whole.reasoning
    assert chunks[-1].usage.completion_tokens > 5


def case_the_stream_helper_ends_with_the_message(url, model):
    api = client(url)
    helper = getattr(api.chat.completions, "stream", None) or api.beta.chat.completions.stream
    with helper(model=model, messages=[{"role": "user", "content": SUM}], temperature=0, max_tokens=200) as stream:
        for _ in stream:
            pass
        equal(stream.get_final_completion().choices[0].message.content, ANSWER)


def case_a_tool_is_called_and_answered(url, model):
    messages = [{"role": "user", "content": WEATHER}]
    asked = chat(url, model, messages=messages, tools=TOOLS).choices[0]
    (call,) = asked.message.tool_calls
    equal((asked.finish_reason, json.loads(call.function.arguments)), ("tool_calls", {"city": "Paris"}))
    messages += [
        asked.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    assert "21" in chat(url, model, messages=messages, tools=TOOLS).choices[0].message.content


def case_a_tool_without_description_is_taken(url, model):
    bare = {"type": "function", "function": {"name": "get_weather", "parameters": FUNCTION["parameters"]}}
    assert chat(url, model, WEATHER, tools=[bare]).choices[0].finish_reason in ("tool_calls", "stop")
    empty = {"type": "function", "name": "get_weather", "parameters": None, "strict": None}
    respond(url, model, WEATHER, tools=[empty])


def case_required_and_named_calls_have_their_shape(url, model):
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        whole = chat(url, model, WEATHER, tools=TOOLS, tool_choice=choice).choices[0]
        (call,) = whole.message.tool_calls
        equal(json.loads(call.function.arguments), {"city": "Paris"})
        chunks = list(chat(url, model, WEATHER, tools=TOOLS, tool_choice=choice, stream=True))
        pieces = [p for chunk in chunks for one in chunk.choices for p in one.delta.tool_calls or []]
        equal(json.loads("".join(p.function.arguments or "" for p in pieces)), {"city": "Paris"})
        assert not joined(chunks, "content").strip()


def case_structured_output_is_parsed(url, model):
    api = client(url).chat.completions
    parse = getattr(api, "parse", None) or client(url).beta.chat.completions.parse
    messages = [{"role": "user", "content": SUM}]
    answer = parse(model=model, messages=messages, response_format=Found, temperature=0, max_tokens=200)
    assert isinstance(answer.choices[0].message.parsed, Found)


def case_responses_answer(url, model):
    answer = respond(url, model)
    equal((answer.status, answer.output_text), ("completed", ANSWER))
    assert next(item for item in answer.output if item.type == "reasoning").content[0].text


def case_responses_stream_a_call(url, model):
    """An agent that acts on `output_item.done` gets the whole call."""
    whole = next(i for i in respond(url, model, WEATHER, tools=FLAT).output if i.type == "function_call")
    events = list(respond(url, model, WEATHER, tools=FLAT, stream=True))
    kinds = [e.type for e in events]
    assert "response.function_call_arguments.delta" in kinds
    done = [e.item for e in events if e.type == "response.output_item.done" and e.item.type == "function_call"]
    equal([(item.name, item.arguments) for item in done], [(whole.name, whole.arguments)])
    deltas = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    assert deltas == whole.arguments
    assert done[0].call_id == events[-1].response.output[-1].call_id


def case_responses_tool_loop(url, model):
    first = respond(url, model, WEATHER, tools=FLAT)
    call = next(item for item in first.output if item.type == "function_call")
    history = [{"role": "user", "content": WEATHER}, *(item.model_dump() for item in first.output)]
    history.append({"type": "function_call_output", "call_id": call.call_id, "output": '{"temperature": 21}'})
    assert "21" in respond(url, model, history, tools=FLAT).output_text


def case_responses_parse_structured_output(url, model):
    answer = client(url).responses.parse(
        model=model, input=SUM, text_format=Found, temperature=0, max_output_tokens=200
    )
    assert isinstance(answer.output_parsed, Found)


def case_an_overlong_prompt_is_named_as_such(url, model):
    """Clients that shorten the history look for these words, or the code."""
    import openai

    for make in (lambda: chat(url, model, "word " * 9000), lambda: respond(url, model, "word " * 9000)):
        try:
            make()
        except openai.BadRequestError as error:
            assert "context length" in str(error), error  # noqa: PT017
        else:
            raise AssertionError("it was taken")
