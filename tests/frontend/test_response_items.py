"""Items that clients of /v1/responses send back: each kind, with and without ids; refusals name the field."""

from __future__ import annotations

import pytest

pytest.importorskip("openai")

from tests.frontend.test_responses import PREAMBLE, RESULT, USER, WEATHER, prompt, respond  # noqa: F401
from tests.frontend.turns import CALL, FOUR, NEXT, PARIS, THOUGHT, call_to

A_CALL = {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{}"}
ITEMS = {  # items of an input, and their text in the prompt after the user's message
    "a message without type": ([{"role": "assistant", "content": "Hi."}], "final<|message|>Hi."),
    "an answer without id": (
        [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi."}]}],
        "final<|message|>Hi.",
    ),
    "reasoning without anything": ([{"type": "reasoning", "summary": [], "content": None}], None),
    "reasoning within a message": (  # microsoft/agent-framework issue 1423
        [
            {
                "role": "assistant",
                "content": [{"type": "reasoning", "summary": {"type": "summary_text", "text": "hm"}}],
            },
            A_CALL,
            RESULT,
        ],
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>",
    ),
    "reasoning of another server": ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAA"}], None),
    "reasoning with text": (
        [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}],
        "analysis<|message|>hm",
    ),
    "a phase": ([{"role": "assistant", "content": "I look.", "phase": "commentary"}], "commentary<|message|>I look."),
    "a preamble": ([{"role": "assistant", "content": "I look."}, A_CALL], "commentary<|message|>I look."),
    "a preamble before reasoning": (
        [{"role": "assistant", "content": "I."}, {"type": "reasoning", "content": [{"text": "hm"}]}, A_CALL, RESULT],
        "commentary<|message|>I.<|end|><|start|>assistant<|channel|>analysis<|message|>hm",
    ),
    "a result in parts": (  # F3
        [A_CALL, RESULT | {"output": [{"type": "input_text", "text": "18 "}, {"type": "output_text", "text": "C"}]}],
        "functions.get_weather to=assistant<|channel|>commentary<|message|>18 C",
    ),
    "a custom call": (
        [
            {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "***"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        ],
        'to=functions.apply_patch<|channel|>commentary json<|message|>{"input": "***"}<|call|>'
        "<|start|>functions.apply_patch to=assistant<|channel|>commentary<|message|>done",
    ),
    "a local shell": (
        [
            {"type": "local_shell_call", "id": "l1", "action": {"type": "exec", "command": ["ls"]}},
            {"type": "local_shell_call_output", "id": "l1", "output": "a b"},
        ],
        'to=functions.local_shell<|channel|>commentary json<|message|>{"type": "exec", "command": ["ls"]}<|call|>'
        "<|start|>functions.local_shell to=assistant<|channel|>commentary<|message|>a b",
    ),
    "a shell": (
        [
            {"type": "shell_call", "call_id": "s1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "s1", "output": [{"stdout": "a", "stderr": ""}]},
        ],
        '<|start|>functions.shell to=assistant<|channel|>commentary<|message|>[{"stdout": "a", "stderr": ""}]',
    ),
    "a patch": (
        [
            {"type": "apply_patch_call", "call_id": "p1", "operation": {"type": "delete_file", "path": "a"}},
            {"type": "apply_patch_call_output", "call_id": "p1", "status": "completed"},
        ],
        "functions.apply_patch to=assistant<|channel|>commentary<|message|>completed",
    ),
    "a call of another server": (
        [{"type": "mcp_call", "name": "look", "server_label": "docs", "arguments": "{}", "output": "seen"}],
        "<|start|>functions.docs__look to=assistant<|channel|>commentary<|message|>seen",
    ),
}


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("name", ITEMS)
def test_an_item_of_an_input_is_refused_or_lost(prompt, name, with_ids):  # noqa: F811
    """F1-F3."""
    items, read = ITEMS[name]
    if with_ids:
        items = [{"id": f"x_{i}", "status": "completed"} | item for i, item in enumerate(items)]
    text, warnings = prompt(input=[USER, *items], user=None)
    assert text == "<|start|>user<|message|>hi<|end|>" if read is None else read in text
    assert not warnings


SEARCH = {"type": "tool_search", "execution": "client", "description": "d", "parameters": {"type": "object"}}
SPACE = {"type": "namespace", "name": "mcp", "description": "d", "tools": [{"type": "function", "name": "look"}]}
FOUND = {"type": "tool_search_output", "call_id": "s1", "tools": [SPACE]}
SEARCHED = {"type": "tool_search_call", "call_id": "s1", "execution": "client", "arguments": {"query": "x"}}


@pytest.mark.parametrize("bite", [None, 1])
def test_a_search_of_the_client_s_is_no_search_call(respond, bite):  # noqa: F811
    text = call_to("commentary to=functions.tool_search <|constrain|>json", '{"query": "x"}')
    got, _ = respond(text, bite, tools=[SEARCH])
    if bite:
        names = [event["type"].removeprefix("response.") for event in got[2:-1]]
        assert names == ["output_item.added", "output_item.done"]
    (item,) = (got[-1]["response"] if bite else got)["output"]
    assert (item["type"], item["execution"], item["status"]) == ("tool_search_call", "client", "completed")
    assert (item["arguments"], item["call_id"][:5]) == ({"query": "x"}, "call_")


def test_tools_that_a_search_has_found_cannot_be_called(respond, prompt):  # noqa: F811
    """Codex sends them only in the search's output; a repeated search must not offer a tool twice."""
    sent = [USER, SEARCHED, FOUND, SEARCHED | {"call_id": "s2"}, FOUND | {"call_id": "s2"}]
    text, warnings = prompt(input=sent, tools=[SEARCH])
    assert 'to=functions.tool_search<|channel|>commentary json<|message|>{"query": "x"}<|call|>' in text
    assert "<|message|>These tools can be called now: mcp__look<|end|>" in text
    assert (text.count("type mcp__look ="), warnings) == (1, ())
    text = call_to("commentary to=functions.mcp__look <|constrain|>json")
    (item,) = respond(text, input=sent, tools=[SEARCH])[0]["output"]
    assert (item["name"], item["namespace"]) == ("look", "mcp")


def test_tools_in_an_item_are_not_offered(respond, prompt):  # noqa: F811
    """Codex sends them to newer models this way, in harmony's own namespace."""
    inner = [{"type": "custom", "name": "exec"}, {"type": "function", "name": "wait"}]
    added = {"type": "additional_tools", "tools": [{"type": "namespace", "name": "functions", "tools": inner}]}
    text, warnings = prompt(input=[added, USER])
    assert ("type exec = " in text, "type wait = " in text, warnings) == (True, True, ())
    text = call_to("commentary to=functions.exec <|constrain|>json", '{"input": "ls"}')
    (item,) = respond(text, input=[added, USER])[0]["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("custom_tool_call", "exec", "functions")


def test_an_image_in_a_result_ends_the_conversation(prompt):  # noqa: F811
    image = {"type": "input_image", "image_url": "data:image/png;base64,x"}
    sent = [USER, A_CALL, RESULT | {"output": [{"type": "input_text", "text": "seen: "}, image]}]
    text, warnings = prompt(input=sent)
    assert "<|message|>seen: (an image, which this model cannot read)<|end|>" in text
    assert warnings == ("input[2].output[1] is left out: gpt-oss reads no part of type input_image",)


@pytest.mark.parametrize("kind", ["web_search_call", "computer_call", "mcp_list_tools", "tool_search_output"])
def test_an_item_of_a_hosted_tool_is_left_out_in_silence(prompt, kind):  # noqa: F811
    text, warnings = prompt(input=[USER, {"type": kind, "id": "x"}, {"type": kind, "id": "y"}])
    assert text == "<|start|>user<|message|>hi<|end|>"
    assert warnings == (f"input[1] is left out: gpt-oss reads no item of type {kind}",)


def test_a_previous_response_is_forgotten(respond, prompt):  # noqa: F811
    _, answer = respond(THOUGHT + NEXT + PREAMBLE + CALL, tools=[WEATHER], instructions="Be brief.")
    call = answer.items()[-1]
    after = RESULT | {"call_id": call["call_id"]}
    text, _ = prompt(answer.conversation(), input=[after])
    assert text == (
        "<|start|>user<|message|>hi<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{PARIS[1]}<|call|>"
        "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>18 degrees<|end|>"
    )
    item = answer.items()[1]["id"]
    text, _ = prompt(answer.conversation(), input=[{"type": "item_reference", "id": item}])
    assert text.endswith("final<|message|>I look.<|end|>")


def test_messages_of_harmony_do_not_come_back(respond, prompt):  # noqa: F811
    response, _ = respond(THOUGHT + FOUR, enable_response_messages=True)
    messages = response["input_messages"] + response["output_messages"]
    text, _ = prompt(input="", previous_input_messages=messages)
    assert text == "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>final<|message|>Four.<|end|>"
