"""Prompts: a client's text reaches the model in its training format, and equally through every API."""

from __future__ import annotations

import datetime
import random
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.engine.chat import Chats
from npu_gptoss.frontend import chat, messages, responses
from npu_gptoss.frontend.request import Defaults
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.harmony.encoding import ContextError
from npu_gptoss.tiny.tokenizer_files import CHAT_TEMPLATE_FILE
from research.tiny_data import make_example
from research.tiny_text import Style
from tests.frontend.conversations import CONVERSATIONS, NOW, answer, as_chat, as_response, call, result, system, user

SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-11-20

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message.{calls}<|end|>"""
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
HELLO, ASSISTANT = "<|start|>user<|message|>Hello<|end|>", "<|start|>assistant"
NOW_TOOL = """# Tools

## functions

namespace functions {

type now = () => any;

} // namespace functions"""
DEVELOPER = "<|start|>developer<|message|># Instructions\n\nBe brief."


@pytest.fixture
def prompt(library, encoder):
    """The prompt of an API's request as text."""

    def prompted(read: Any, defaults: Defaults = Defaults(date="2025-11-20"), **fields: Any) -> str:  # noqa: B008
        return library.decode(read(fields, defaults).asked.prompt(encoder))

    return prompted


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_the_chat_template_or_an_entrance_writes_another_prompt(library, encoder, name):
    jinja2 = pytest.importorskip("jinja2")
    case = CONVERSATIONS[name]
    fields = as_chat(case)
    effort = {"minimal": "low"}.get(fields["reasoning_effort"], fields["reasoning_effort"])
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(CHAT_TEMPLATE_FILE.read_text()).render(
        messages=case["messages"],
        tools=fields.get("tools"),
        add_generation_prompt=True,
        reasoning_effort=effort,
        strftime_now=lambda _: datetime.date.today().isoformat(),
    )
    ours = chat.read(fields).asked.prompt(encoder)
    assert text == library.decode(ours)
    assert responses.read(as_response(case)).asked.prompt(encoder) == ours


def test_the_offline_engine_writes_another_prompt(directory, library, encoder):
    chats = Chats(directory)
    for case in CONVERSATIONS.values():
        assert chats.prompt(chats.read(as_chat(case))) == chat.read(as_chat(case)).asked.prompt(encoder)


def test_the_tiny_models_training_text_is_not_the_served_prompt(library, encoder):
    """Training needs no openai-harmony; its default prompt must equal a server's."""
    rng = random.Random(3)
    date = datetime.date.today().isoformat()
    for _ in range(100):
        example = make_example(rng)
        fields = {"messages": example.messages, "tools": example.tools, "reasoning_effort": example.reasoning_effort}
        served = chat.read(fields, Defaults(date=date)).asked.prompt(encoder)
        assert example.prompt(Style(date=date)) == library.decode(served)


def test_a_question_is_not_rendered_as_harmony_has_it(prompt, library, encoder):
    expected = SYSTEM.format(calls="") + HELLO + ASSISTANT
    assert prompt(chat.read, messages=[user("Hello")]) == expected
    ids = chat.read({"messages": [user("Hello")]}, Defaults(date="2025-11-20")).asked.prompt(encoder)
    assert ids == library.encode(expected, allowed_special="all")


@pytest.mark.parametrize("name", ["get_weather", "functions.get_weather"])
def test_a_result_without_an_id_loses_its_name(prompt, name):
    text = prompt(chat.read, messages=[user(), {"role": "tool", "name": name, "content": "3"}])
    assert "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>3<|end|>" in text


def test_reasoning_that_the_model_is_to_continue_becomes_an_answer(prompt):
    begun = [user("Hello"), answer(None, reasoning="I hum")]
    text = prompt(chat.read, messages=begun, continue_final_message=True)
    assert text.endswith(f"{HELLO}{ASSISTANT}<|channel|>analysis<|message|>I hum")
    begun[1] = {"role": "assistant", "content": [{"type": "thinking", "thinking": "I hum"}]}
    assert prompt(messages.read, messages=begun, max_tokens=9) == text


@pytest.mark.parametrize("order", [("now", "get_weather"), ("get_weather", "now")])
@pytest.mark.parametrize("named", [False, True])
def test_calls_that_share_an_id_lose_their_results_to_the_last(prompt, order, named):
    """smolagents issue 2683: gateways send the same id, or an empty one, for each call."""
    calls = [call(call_id="", name=name)["tool_calls"][0] for name in ("now", "get_weather")]
    results = [result(f"of {name}", "") | ({"name": name} if named else {}) for name in order]
    asked = [user(), answer(None, tool_calls=calls), *results]
    text = prompt(chat.read, messages=[*asked, *asked])
    for name in order if named else ("now", "get_weather"):
        written = f"of {name if named else order[name == 'get_weather']}<|end|>"
        assert text.count(f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{written}") == 2


THOUGHT = {
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "I need it."),
    "reasoning_details": [{"type": "reasoning.text", "text": "I need it."}, {"type": "reasoning.encrypted"}],
    "thinking_blocks": [{"type": "thinking", "thinking": "I need it."}, {"type": "redacted_thinking"}],  # LiteLLM's
}


@pytest.mark.parametrize("field", THOUGHT)
def test_a_call_or_its_reasoning_changes_in_the_prompt(prompt, field):
    messages = [user(), call(**{field: THOUGHT[field]}), result()]
    text = prompt(chat.read, messages=messages, tools=[{"type": "function", "function": NOW}])
    assert text == (
        SYSTEM.format(calls=CALLS) + f"<|start|>developer<|message|>{NOW_TOOL}<|end|>"
        "<|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I need it.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20 degrees<|end|>"
        "<|start|>assistant"
    )


def test_a_refusal_or_an_image_of_a_tool_is_lost(prompt):
    assert "final<|message|>I can't.<|end|>" in prompt(chat.read, messages=[user(), answer(None, refusal="I can't.")])
    image = {"role": "tool", "tool_call_id": "c1", "content": [{"type": "image_url"}, {"type": "text", "text": "."}]}
    sent = {"messages": [user(), call(), result() | image]}
    assert "<|message|>(an image, which this model cannot read).<|end|>" in prompt(chat.read, **sent)
    (warning,) = chat.read(sent).asked.warnings
    assert warning.startswith("messages[2].content[0] is left out")


def test_instructions_of_a_response_are_dropped_or_not_joined(prompt):
    own = [system("In English."), user("Hello")]
    tools = [{"type": "function", **NOW}]
    text = prompt(responses.read, instructions="Be brief.", tools=tools, input=own)
    assert text.endswith(f"{DEVELOPER}\n\nIn English.\n\n{NOW_TOOL}<|end|>{HELLO}{ASSISTANT}")
    text = prompt(responses.read, instructions="Be brief.", input="Hello")
    assert text.endswith(f"{DEVELOPER}<|end|>{HELLO}{ASSISTANT}")


def test_instructions_miss_the_system_turn_where_the_server_wants_them(prompt):
    defaults = Defaults(instructions_in_system=True)
    messages = [system("Be brief."), system("In English.", "developer"), user("Hello")]
    text = prompt(chat.read, defaults, messages=messages, tools=[{"type": "function", "function": NOW}])
    assert "OpenAI.\nBe brief.\n\nIn English.\n" in text
    assert text.endswith(f"<|start|>developer<|message|>{NOW_TOOL}<|end|>{HELLO}{ASSISTANT}")
    text = prompt(responses.read, defaults, instructions="Be brief.", input="Hello")
    assert "OpenAI.\nBe brief.\n" in text
    assert "developer" not in text


def test_defaults_of_the_server_are_forgotten_or_beat_the_request(prompt):
    defaults = Defaults(effort="low", efforts={"deep": "high"}, identity="You are Tiny.")
    for read, given in ((chat.read, {"messages": [user()]}), (responses.read, {"input": "Hello"})):
        assert "Reasoning: low" in prompt(read, defaults, **given)
        assert "Reasoning: high" in prompt(read, defaults, reasoning_effort="deep", **given)
        assert "<|message|>You are Tiny.\n" in prompt(read, defaults, **given)
        own = prompt(read, defaults, chat_template_kwargs={"model_identity": "You are Own."}, **given)
        assert "<|message|>You are Own.\n" in own


def test_a_summary_of_reasoning_is_read_as_reasoning(prompt):
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "short"}]}
    content = [{"type": "output_text", "text": "Hi.", "annotations": []}]
    item = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content}
    text = prompt(responses.read, input=[user("Hello"), summary, item, user("Hello")])
    assert text.endswith(f"{HELLO}{ASSISTANT}<|channel|>final<|message|>Hi.<|end|>{HELLO}{ASSISTANT}")


def test_a_text_that_no_context_can_hold_is_encoded(encoder):
    asked = chat.read({"messages": [user("-" * (129 * 4096))]}).asked
    with pytest.raises(ContextError, match=r"length is 4096 tokens\. However, your request has at least \d+ input"):
        asked.prompt(encoder, 4096)


@pytest.mark.parametrize("date", ["tomorrow", "2025-13-01"])
def test_a_date_of_another_form_is_taken(prompt, date):
    with pytest.raises(ConversationError) as refused:
        prompt(chat.read, Defaults(date=date), messages=[user()])
    assert refused.value.param == "date"


def test_nested_and_optional_arguments_are_shown_as_any(prompt):
    """pydantic writes `$ref` and `anyOf` for them, of which harmony knows neither."""
    place = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    kinds, text = [{"$ref": f"#/definitions/{name}"} for name in ("Sun", "Rain")], {"x": {"type": "string"}}
    shown = {
        "city: string,": {"$ref": "#/$defs/Place"},
        "a?: {\n    city: string,\n    } | null,": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "b?: {\n    city: string,\n    }[],": {"type": "array", "items": {"$ref": "#/$defs/Place"}},
        "c?: {\n    city: string,\n    day?: string,\n    },": {
            "allOf": [{"$ref": "#/$defs/Place"}, {"properties": {"day": {"type": "string"}}}]
        },
        "d?: string | null, // default: null": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        'e?: "x",': {"const": "x"},
        'f?: "x" | "y" | null,': {"anyOf": [{"enum": ["x", "y"]}, {"type": "null"}]},
        'g?:\n | {\n   kind?: "sun",\n   }\n | {\n   kind?: "rain",\n   }\n,': {"oneOf": kinds},
        "h?: {\n    v?: string,\n    next?: any,\n    },": {"$ref": "#/$defs/Node"},
        "i?: any,": {"$ref": "#/$defs/Nothing"},
        "j?: {\n    x?: string,\n    }[],": {"items": {"properties": {"x": {"type": "STRING"}}}},
        "k?: {\n    x?: string,\n    } | null,": {"type": ["object", "null"], "properties": {"x": {"type": "string"}}},
        "l?: string[] | null,": {"type": ["array", "null"], "items": {"type": "string"}},
        "m?: string,": {"type": "string", "anyOf": [{"format": "date"}, {"format": "uri"}]},
        "n?: {\n    x?: string,\n    },": {"properties": text, "oneOf": [{"required": ["x"]}, {"required": ["y"]}]},
        "o?: any | null,": {"anyOf": [{}, {"type": "null"}]},
        "p?: {\n    x?: string,\n    y: string,\n    } | null,": {
            "properties": text,
            "anyOf": [{"properties": {"y": {"type": "string"}}, "required": ["y"]}, {"type": "null"}],
        },
    }
    node = {"type": "object", "properties": {"v": {"type": "string"}, "next": {"$ref": "#/$defs/Node"}}}
    definitions = {
        name: {"type": "object", "properties": {"kind": {"const": name.lower()}}} for name in ("Sun", "Rain")
    }
    more = {"$defs": {"Place": place, "Node": node}, "definitions": definitions}
    for text, schema in shown.items():
        parameters = {"type": "object", "properties": {text[0]: schema}} if text[1] == "?" else schema
        tools = [{"type": "function", "function": {"name": "f", "parameters": parameters | more}}]
        assert f"type f = (_: {{\n{text}\n}}) => any;" in prompt(chat.read, messages=[user("x")], tools=tools)


@pytest.mark.parametrize("kind", ["anyOf", "oneOf"])
def test_a_tool_with_two_sets_of_arguments_shows_none(prompt, kind):
    """imagekit-nodejs issue 150, mcpx issue 28, netclaw issue 722."""
    ways = [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("id", "url")]
    shown = " | {{\n{0}   id: string,\n   }}\n | {{\n{0}   url: string,\n   }}"
    for own, common in (({}, ""), ({"properties": {"size": {"type": "integer"}}}, "   size?: number,\n")):
        tool = {"name": "f", "parameters": {"type": "object", **own, kind: ways}}
        text = prompt(chat.read, messages=[user("x")], tools=[{"type": "function", "function": tool}])
        assert f"type f = (_: \n{shown.format(common)}) => any;" in text


def test_arguments_common_to_many_sets_fill_the_memory(prompt):
    def level(depth: int) -> dict[str, Any]:
        own = {"d": {"description": "d" * 999}} | ({"below": level(depth - 1)} if depth else {})
        return {"properties": own, "oneOf": [{"properties": {f"a{number}": {}}} for number in range(20)]}

    tools = [{"type": "function", "function": {"name": "f", "parameters": level(9)}}]
    assert len(prompt(chat.read, messages=[user("x")], tools=tools)) < 1_000_000


def test_references_that_double_at_each_level_fill_the_memory(prompt):
    def level(number: int) -> dict[str, Any]:
        below = {"$ref": f"#/$defs/l{number + 1}"}
        return {"type": "object", "properties": {"a": below, "b": below}}

    parameters = level(-1) | {"$defs": {f"l{number}": level(number) for number in range(60)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    assert len(prompt(chat.read, messages=[user("x")], tools=tools)) < 1_000_000
