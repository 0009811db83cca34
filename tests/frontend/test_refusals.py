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
    ({"messages": [answer(None, tool_calls=[{}])]}, "messages[0].tool_calls[0].name"),
    ({"messages": [user()], "tools": [{"type": "spell", "name": "f"}]}, "tools[0].type"),
    ({"messages": [user()], "tools": {}}, "tools"),
    (
        {"messages": [user()], "tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        "tools[0].parameters",
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
    ({"input": [USER, RESULT]}, "input[1].call_id"),
    ({"input": [USER, A_CALL | {"name": None}]}, "input[1].name"),
    ({"input": [USER, A_CALL | {"call_id": None}]}, "input[1].call_id"),
    ({"input": [USER, A_CALL, RESULT | {"output": 18}]}, "input[2].output"),
    ({"input": [USER, {"type": "additional_tools", "tools": "x"}]}, "input[1].tools"),
    ({"input": [{"type": "additional_tools", "tools": [{"type": "x"}]}, USER]}, "input[0].tools[0].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "npu_gptoss.x"}]}, "input[0].encrypted_content"),
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
