"""Requests that no API can serve: each refusal names the field in the client's own spelling."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.frontend import chat, messages, responses
from npu_gptoss.harmony.conversation import ConversationError
from tests.frontend.conversations import WEATHER, answer, user
from tests.frontend.turns import flat
from tests.serving.openai.cases import CHATS, RESPONSES

USER = {"role": "user", "content": "hi"}
A_CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"}
PARIS = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
RAINS = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
TOOL = {"type": "function", "function": WEATHER}
SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}


def _last(content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [USER, {"role": role, "content": content}]}


# API -> fields of a request, and the path that the refusal names
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [
        *CHATS,
    ({"messages": []}, "messages"),
    ({"messages": "Hi"}, "messages"),
    ({"messages": ["Hi"]}, "messages[0].role"),
    ({"messages": [user([{"type": "image_url"}])]}, "messages[0].content[0]"),
    ({"messages": [user(5)]}, "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
    ({"messages": [answer(None, tool_calls=[{}])]}, "messages[0].tool_calls[0].function.name"),
    ({"messages": [answer(None, tool_calls={})]}, "messages[0].tool_calls"),
    ({"messages": [answer(None, audio={"id": "a"})]}, "messages[0].audio"),
    ({"messages": [user()], "reasoning": "high"}, "reasoning"),
    ({"messages": [user()], "parallel_tool_calls": "perhaps"}, "parallel_tool_calls"),
    ({"messages": [user()], "stream_options": {"include_usage": "perhaps"}}, "stream_options.include_usage"),
    ({"messages": [user()], "min_tokens": "few"}, "min_tokens"),
    ({"messages": [user()], "tools": [{"type": "spell", "name": "f"}]}, "tools[0].type"),
    ({"messages": [user()], "tools": {}}, "tools"),
    ({"chat_template_kwargs": {"builtin_tools": ["python"]}}, "chat_template_kwargs.builtin_tools"),
    ({"messages": [user()], "tools": [{"name": "f", "input_schema": {}}]}, "tools[0].input_schema"),
    ({"messages": [user()], "tools": [{"type": "function", "function": {"name": "f", "inputSchema": {}}}]},
     "tools[0].function.inputSchema"),
    (
        {"messages": [user()], "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools[0].function.parameters",
    ),
    ({"messages": [user()], "logits_processors": ["a.b"]}, "logits_processors"),
    ({"messages": [user()], "tools": [TOOL], "tool_choice": "now"},
     "tool_choice"),
    ],
    "responses": [
        *RESPONSES,
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [USER, 7]}, "input[1]"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": None}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": [USER, {"type": "nonsense"}]}, "input[1].type"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1]"),
    ({"input": [USER, {"id": "msg_1"}]}, "input[1]"),
    ({"input": [USER, {"type": "compaction", "encrypted_content": "x"}]}, "input[1]"),
    ({"input": [USER, {"type": "configuration_update", "reasoning": {"effort": "low"}}]}, "input[1]"),
    ({"input": [USER, RESULT]}, "input[1].call_id"),
    ({"input": [USER, A_CALL | {"name": None}]}, "input[1].name"),
    ({"input": [USER, A_CALL | {"call_id": None}]}, "input[1].call_id"),
    ({"input": [USER, A_CALL, RESULT | {"output": 18}]}, "input[2].output"),
    ({"input": [USER, {"type": "additional_tools", "tools": "x"}]}, "input[1].tools"),
    ({"input": [{"type": "additional_tools", "tools": [{"type": "x"}]}, USER]}, "input[0].tools[0].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "npu_gptoss.x"}]}, "input[0].encrypted_content"),
    ({"input": [answer(None, tool_calls=[{"id": "c1"}])]}, "input[0].tool_calls"),
    ({"tools": [flat(TOOL)], "tool_choice": {"type": "allowed_tools", "tools": ["get_weather"]}}, "tool_choice.tools"),
    ({"background": "later"}, "background"),
    ({"include": "all"}, "include"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"truncation": "middle"}, "truncation"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
    (
        {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"regex": "x"}},
        "structured_outputs.regex",
    ),
    ({"tools": [flat(TOOL)], "tool_choice": {"type": "web_search_preview"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"previous_input_messages": [{"role": 7}]}, "previous_input_messages[0]"),
    ],
    "messages": [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    (_last("x", "robot"), "messages[1].role"),
    (_last(None), "messages[1].content"),
    (_last([RAINS]), "messages[1].content[0].tool_use_id"),
    (_last([{"type": "image", "source": {"type": "url", "url": "x"}}]), "messages[1].content[0]"),
    (_last([{"type": "document", "source": {"type": "base64"}}]), "messages[1].content[0]"),
    (_last([{"type": "text", "text": 1}]), "messages[1].content[0].text"),
    (_last([PARIS], "assistant"), "messages[1].content[0]"),
    ({"tools": [{"type": "bash_20250124"}, {"name": "f"}]}, "tools[1].input_schema"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),  # Claude Code's search
    ({"tools": [{"name": "f g", "input_schema": {}}]}, "tools[0].name"),
    ({"tools": [{"type": "invented", "name": "f"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "all"}}, "tool_choice.type"),
    ({"thinking": {"type": "much"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
    ({"stop_sequences": "x"}, "stop_sequences"),
    ({"compaction": {"type": "summarize"}}, "compaction"),
    (_last("3 + ", "assistant") | {"output_config": {"format": SCHEMA}}, "output_config.format"),
    ],
}  # fmt: skip
# API -> fields without effect, and the fields that the warnings name
LEFT_OUT: dict[str, tuple[dict[str, Any], list[str]]] = {
    "chat": (
        {
            **{"seed": 1, "verbosity": "low", "store": True, "function_call": "none", "thinking": {}},
            **{
                "messages": [USER | {"name": "Ann"}],
                "reasoning": {"effort": "low", "enabled": True, "max_tokens": None},
                "stream_options": {"include_usage": True, "include_obfuscation": False, "include_cost": True},
            },
        },
        [
            *("thinking", "verbosity", "store", "reasoning.enabled", "function_call"),
            *("messages[0].name", "stream_options.include_cost"),
        ],
    ),
    "responses": (
        {
            **{"text": {"verbosity": "low"}, "reasoning": {"summary": "auto"}, "n": 2, "store": True},
            "context_management": [{"type": "compaction"}],
        },
        ["n", "context_management", "reasoning.summary", "text.verbosity"],
    ),
    "messages": (
        {
            **{"seed": 1, "mcp_servers": [{}], "context_management": {"edits": []}, "metadata": {}},
            "thinking": {"type": "enabled", "budget_tokens": 1024},
            "output_config": {"effort": "low", "task_budget": {"type": "tokens", "total": 9}},
        },
        ["seed", "mcp_servers", "context_management", "thinking.budget_tokens", "output_config.task_budget"],
    ),
}
READ = {
    "chat": (chat.read, {"messages": [USER]}),
    "responses": (responses.read, {"input": "hi"}),
    "messages": (messages.read, {"messages": [USER], "max_tokens": 9}),
}


@pytest.mark.parametrize(("api", "fields", "param"), [(api, *row) for api, rows in REFUSED.items() for row in rows])
def test_refusal_does_not_name_the_field(encoder, api, fields, param):
    """F26."""
    read, body = READ[api]
    with pytest.raises(ConversationError) as refused:
        read(body | fields).asked.prompt(encoder)
    assert (refused.value.param, str(refused.value).partition(": ")[0]) == (param, param)


@pytest.mark.parametrize("api", LEFT_OUT)
def test_field_is_ignored_in_silence(api):
    (read, body), (fields, named) = READ[api], LEFT_OUT[api]
    assert [warning.partition(" ")[0] for warning in read(body | fields).asked.warnings] == named


DEFAULTS = {
    "chat": {
        **{"documents": [], "store": False, "verbosity": None, "reasoning": {"summary": None}},
        "tools": [{"type": None, "function": WEATHER}],
    },
    "responses": {"conversation": None, "context_management": [], "text": {"verbosity": None}, "tools": [WEATHER]},
    "messages": {"mcp_servers": [], "context_management": None, "output_config": {"task_budget": None}},
}


@pytest.mark.parametrize("api", READ)
def test_empty_value_of_a_field_is_refused_or_warned_about(api):
    read, body = READ[api]
    assert read(body | DEFAULTS[api]).asked.warnings == ()


@pytest.mark.parametrize("api", READ)
def test_flag_or_number_that_is_a_text_is_misread(api):
    read, body = READ[api]
    asked = read(body | {"stream": "false", "min_tokens": "3", "parallel_tool_calls": 0, "include_reasoning": "false"})
    assert asked.stream is False
    if api != "messages":  # which has no such fields
        rules = asked.asked.reading
        assert (rules.min_tokens, rules.parallel, rules.with_reasoning) == (3, False, False)
    if api == "chat":
        flags = {"continue_final_message": "false", "echo": "false", "add_generation_prompt": "true"}
        flags |= {"stream_options": {"include_usage": "false"}, "reasoning": {"exclude": "false"}}
        asked = read({"messages": [USER, {"role": "assistant", "content": "x"}]} | flags)
        assert (asked.asked.continued, asked.echo, asked.usage) == (None, "", False)
        assert asked.asked.reading.with_reasoning
