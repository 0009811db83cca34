"""The APIs' spellings of a chat: its fields, and an answer as (content, reasoning, calls, finish reason) of a chat."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.frontend.turns import flat


def answered(message: dict[str, Any], finish: str) -> tuple:
    """Content, reasoning, calls and finish reason of a chat's message."""
    calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
    assert message["reasoning"] == message["reasoning_content"]
    return message["content"] or "", message["reasoning"] or "", calls, finish


def gathered(lines: Sequence[str], index: int = 0) -> tuple:
    """Collects the final message that the client of a streamed chat has."""
    content = reasoning = ""
    calls: list[list[str]] = []
    finish = None
    for line in lines:
        chunk = json.loads(line.removeprefix("data: "))
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            content += delta.get("content") or ""
            reasoning += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"].get("arguments") or ""
            finish = choice["finish_reason"] or finish
    return content, reasoning, calls, finish


def of_response(response: dict[str, Any]) -> tuple:
    """Content, reasoning, calls and finish reason of a whole response."""
    texts: dict[str, list[str]] = {"message": [], "reasoning": []}
    calls = []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append([item["name"], item["arguments"]])
        else:
            texts[item["type"]] += [part["text"] for part in item["content"]]
    finish = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return "\n".join(filter(None, texts["message"])), "\n".join(texts["reasoning"]), calls, finish


def tool(function: dict[str, Any]) -> dict[str, Any]:
    own = function["function"]
    return {"name": own["name"], "input_schema": own["parameters"]}


def of_chat(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a chat in Anthropic's spelling."""
    own = dict(fields)
    if "tools" in own:
        own["tools"] = [tool(one) for one in own["tools"]]
    if (choice := own.pop("tool_choice", None)) is not None:
        named = isinstance(choice, dict)
        own["tool_choice"] = {"type": "tool", "name": choice["function"]["name"]} if named else {"type": choice}
        own["tool_choice"]["type"] = {"required": "any"}.get(own["tool_choice"]["type"], own["tool_choice"]["type"])
    if (stop := own.pop("stop", None)) is not None:
        own["stop_sequences"] = stop
    if own.pop("include_reasoning", True) is False:
        own["thinking"] = {"type": "disabled"}
    return own


def message_of(text: str) -> dict[str, Any]:
    """Builds the message of a stream as Anthropic's SDKs do, and checks the order of its events."""
    events = []
    for one in text.removesuffix("\n\n").split("\n\n"):
        name, data = one.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["type"] for event in (events[0], *events[-2:])] == ["message_start", "message_delta", "message_stop"]
    message, opened = events[0]["message"], False
    assert (message["type"], message["role"], message["content"]) == ("message", "assistant", [])
    assert (message["stop_reason"], message["usage"]["output_tokens"]) == (None, 0)
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert (opened, event["index"]) == (False, len(message["content"]))
            message["content"].append(event["content_block"] | {"partial": ""})
            opened = True
            continue
        block = message["content"][-1]
        assert (opened, event["index"]) == (True, len(message["content"]) - 1)
        if event["type"] == "content_block_stop":
            raw, opened = block.pop("partial"), False
            if block["type"] == "tool_use":
                block["input"] = parsed(raw)
            continue
        delta = event["delta"]
        name = {"input_json_delta": "partial_json"}.get(delta["type"], delta["type"].removesuffix("_delta"))
        block[{"partial_json": "partial"}.get(name, name)] += delta[name]
    assert not opened
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def parsed(raw: str) -> Any:
    try:
        return json.loads(raw or "{}")
    except ValueError:
        return {"INVALID_JSON": raw}


FINISHED = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


def of_message(message: dict[str, Any]) -> tuple:
    """The same of a message, with the calls' inputs parsed."""

    def text(kind: str, name: str) -> str:
        return "\n".join(block[name] for block in message["content"] if block["type"] == kind)

    calls = [[block["name"], block["input"]] for block in message["content"] if block["type"] == "tool_use"]
    return text("text", "text"), text("thinking", "thinking"), calls, FINISHED[message["stop_reason"]]


def _of_chat_answer(answer: dict[str, Any]) -> tuple:
    (choice,) = answer["choices"]
    return answered(choice["message"], choice["finish_reason"])


def _of_chat_stream(text: str) -> tuple:
    *lines, last = filter(None, text.split("\n\n"))
    assert last == "data: [DONE]"
    return gathered(lines)


def _of_response_stream(text: str) -> tuple:
    from tests.frontend.events import built

    events = [json.loads(event.partition("\ndata: ")[2]) for event in filter(None, text.split("\n\n"))]
    assert built(events) == events[-1]["response"]["output"]
    return of_response(events[-1]["response"])


def _for_responses(fields: dict[str, Any]) -> dict[str, Any]:
    own = {"tools": [flat(tool) for tool in fields.get("tools", ())], "tool_choice": flat(fields.get("tool_choice"))}
    return fields | own


class Api(NamedTuple):
    """fields: of a chat, in its spelling. whole, streamed: its answer as a turn. wanted: a chat's turn as its."""

    fields: Callable[[dict[str, Any]], dict[str, Any]]
    whole: Callable[[dict[str, Any]], tuple]
    streamed: Callable[[str], tuple]
    wanted: Callable[[tuple], tuple] = lambda turn: turn


APIS = {
    "chat": Api(dict, _of_chat_answer, _of_chat_stream),
    "responses": Api(_for_responses, of_response, _of_response_stream),
    "messages": Api(
        of_chat,
        of_message,
        lambda text: of_message(message_of(text)),
        lambda turn: (*turn[:2], [[name, parsed(arguments)] for name, arguments in turn[2]], turn[3]),
    ),
}
