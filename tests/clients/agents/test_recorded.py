"""Requests that Codex 0.171, Claude Code 2.1.332 and OpenCode 1.18.33 have sent, against each release of vLLM.

They were recorded from the agents and shortened; `requests/` has one of each kind, also of kinds that test_agents.py
does not send. A message of the user is added to each, which the model writes as its turn (tests/serving/scripted.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents.script import answer, call
from tests.serving.openai.conftest import NAME, Answer, Server

pytestmark = [pytest.mark.clients, pytest.mark.slow]

REQUESTS = Path(__file__).parent / "requests"
NAMES = sorted(path.stem for path in REQUESTS.glob("*.json"))
COUNT, SEARCH = "claude_code_count_tokens", "claude_code_web_search"
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
CALLED = {"type": "function_call", "status": "completed"}
# request, the function as the model calls it, its arguments, and what the client must have of the call
CALLS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("codex_second_turn", "apply_patch", {"input": "*** p"}, {"type": "custom_tool_call", "input": "*** p"}),
    ("codex_mcp", "mcp__calc__add", {"a": 3}, {**CALLED, "name": "add", "namespace": "mcp__calc"}),
    (
        *("codex_code_mode", "exec", {"input": "text(1)"}),
        {"type": "custom_tool_call", "name": "exec", "namespace": "functions", "input": "text(1)"},
    ),
    (
        *("codex_tool_search", "tool_search", {"query": "agent"}),
        {"type": "tool_search_call", "execution": "client", "arguments": {"query": "agent"}},
    ),
    (  # found by the search before
        *("codex_tool_search", "multi_agent_v1__close_agent", {"target": "x"}),
        {**CALLED, "name": "close_agent", "namespace": "multi_agent_v1"},
    ),
    ("claude_code_second_turn", "Bash", {"command": "ls"}, {"name": "Bash", "input": {"command": "ls"}}),
    ("claude_code_tool_search", "WebFetch", {"url": "x"}, {"name": "WebFetch", "input": {"url": "x"}}),
    ("opencode_chat", "bash", {"command": "ls"}, {"name": "bash", "arguments": '{"command": "ls"}'}),
    ("opencode_responses", "bash", {"command": "ls"}, {**CALLED, "name": "bash"}),
    ("opencode_messages", "bash", {"command": "ls"}, {"name": "bash", "input": {"command": "ls"}}),
]


def route(body: dict[str, Any]) -> str:
    return RESPONSES if "input" in body else CHAT if "stream_options" in body else MESSAGES


def send(server: Server, name: str, written: str, **fields: Any) -> Answer:
    body = json.loads((REQUESTS / f"{name}.json").read_text()) | {"model": NAME} | fields
    body["input" if "input" in body else "messages"].append({"role": "user", "content": written})
    return server.post(f"{MESSAGES}/count_tokens" if name == COUNT else route(body), body)


def read(answered: Answer) -> tuple[str, list[dict[str, Any]]]:
    """The text and the calls of a stream of any API, from the events that the agents read."""
    assert answered.status == 200, answered.text
    if answered.text.startswith("data: "):
        deltas = [c["delta"] for line in answered.lines for c in json.loads(line[6:])["choices"]]
        calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or ()]
        joined = "".join(call["arguments"] for call in calls)
        text = "".join(delta.get("content") or "" for delta in deltas)
        return text, [calls[0] | {"arguments": joined}] if calls else []
    events = answered.events
    if events[0]["type"] == "response.created":
        assert events[-1]["type"] == "response.completed"
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert events[-1]["response"]["output"] == items
        texts = [part["text"] for item in items if item["type"] == "message" for part in item["content"]]
        return "".join(texts), [item for item in items if item["type"] not in ("message", "reasoning")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    starts = [event for event in events if event["type"] == "content_block_start"]
    stops = [event["index"] for event in events if event["type"] == "content_block_stop"]
    assert stops == list(range(len(starts)))
    calls = []
    for start in starts:
        if (block := start["content_block"])["type"] == "tool_use":
            deltas = [e["delta"] for e in events if e["type"] == "content_block_delta" and e["index"] == start["index"]]
            calls.append({"name": block["name"], "input": json.loads("".join(d["partial_json"] for d in deltas))})
    return "".join(e["delta"]["text"] for e in events if e.get("delta", {}).get("type") == "text_delta"), calls


@pytest.mark.parametrize("name", sorted({*NAMES} - {COUNT, SEARCH}))
def test_a_recorded_request_is_refused(server: Server, name: str) -> None:
    assert read(send(server, name, answer("Four."))) == ("Four.", [])


@pytest.mark.parametrize(("name", "function", "arguments", "wanted"), CALLS, ids=[f"{c[0]}-{c[1]}" for c in CALLS])
def test_a_call_comes_in_a_form_that_the_agent_does_not_know(server, name, function, arguments, wanted) -> None:
    _, (got,) = read(send(server, name, call(function, **arguments)))
    assert got | wanted == got


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("codex_second_turn", "no tool of type web_search"),
        ("codex_image", "no part of type input_image"),
        ("claude_code_image", "no block of type image"),
    ],
)
def test_a_part_is_left_out_without_a_warning(server: Server, name: str, said: str) -> None:
    assert said in send(server, name, answer("Four.")).headers["x-npu-gptoss-warning"]


def test_a_search_of_the_web_alone_is_answered_with_the_model_s_inventions(server: Server) -> None:
    refused = send(server, SEARCH, answer("Four."))
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert refused.error["message"].startswith("tools[0].type: expected at least one tool with an input_schema")


def test_the_tokens_of_a_recorded_request_are_not_counted(server: Server) -> None:
    assert send(server, COUNT, "x").json["input_tokens"] > 1000
