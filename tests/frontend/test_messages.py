"""Anthropic's messages: requests reach the model unchanged, and streams equal whole answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.frontend import chat, messages
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.harmony.encoding import ContextError
from tests.frontend.apis import APIS, message_of, of_chat, of_message, tool
from tests.frontend.conftest import MESSAGES, Script, run
from tests.frontend.turns import BASH, CALL, FOUR, NEXT, THOUGHT, TURNS, WEATHER, call_to

PARIS = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}}
RAINS = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "rain"}
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def answer(library, encoder, tokens) -> Callable[..., Any]:
    """Returns the answer to a turn of the model; bite: None for a whole answer, else the size of a step."""

    def answered(text: str, bite: int | None = None, finish: str | None = None, **fields: Any) -> Any:
        request = messages.read({"messages": MESSAGES, "max_tokens": 64, "stream": bite is not None} | fields)
        script = Script(tokens(text), bite or 3, finish)
        prompt = request.asked.prompt(encoder)
        facts = messages.Facts("msg_1", "gpt-oss", len(prompt), cached_details=True)
        made = messages.Answer(request, facts, lambda: request.asked.turn(encoder))
        got = run(made, script, whole=bite is None)
        return got if bite is None else message_of("".join(got))

    return answered


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    return message | {"content": [{**block, "id": None} for block in message["content"]]}


@pytest.mark.parametrize("name", TURNS)
def test_a_turn_is_read_alike_whole_streamed_and_by_chat(answer, name):
    text, fields, want = TURNS[name]
    own = of_chat(fields)
    whole = answer(text, **own)
    assert of_message(whole) == APIS["messages"].wanted(want)
    assert (whole["stop_reason"] == "stop_sequence") == ("stop" in fields)
    assert all(block.get("signature", True) for block in whole["content"])
    for bite in (1, 3, 100):
        assert without_ids(answer(text, bite, **own)) == without_ids(whole), bite


@pytest.mark.parametrize("bite", [None, 1])
def test_an_answer_is_no_message_of_anthropics_sdk(answer, bite):
    types = pytest.importorskip("anthropic.types")
    for text, fields, _ in TURNS.values():
        types.Message.model_validate(answer(text, bite, **of_chat(fields)), strict=True)


@pytest.mark.parametrize("bite", [None, 1, 100])
def test_a_cut_or_malformed_call_loses_its_text(answer, bite):
    tools = {"tools": [tool(WEATHER), tool(BASH)]}
    cut = answer(CALL[: CALL.index("ris")], bite, **tools)
    assert (cut["content"][-1]["input"], cut["stop_reason"]) == ({"INVALID_JSON": '{"city":"Pa'}, "max_tokens")
    for raw in ('{"cmd": ls}', '["ls"', '{"cmd":"\\'):
        got = answer(call_to("commentary to=functions.bash", raw), bite, **tools)
        assert (got["content"][-1]["input"], got["stop_reason"]) == ({"INVALID_JSON": raw}, "tool_use")
    if bite is None:  # Python reads it, but no JSON can contain it
        for raw in ('{"cmd":NaN}', '{"cmd":1e999}', '{"cmd":"\\ud800"}', "[1]", "[" * 5000):
            got = answer(call_to("commentary to=functions.bash", raw), **tools)
            assert got["content"][-1]["input"] == {"INVALID_JSON": raw}


@pytest.mark.parametrize("bite", [None, 1, 2, 100])
def test_a_line_end_in_a_json_string_breaks_the_call(answer, bite):
    raw = '{\n "cmd": "a\\"\\\\\n\tb"\n}'
    got = answer(call_to("commentary to=functions.bash", raw), bite, tools=[tool(BASH)])
    assert got["content"] == [
        {"type": "tool_use", "name": "bash", "input": {"cmd": 'a"\\\n\tb'}} | {"id": got["content"][0]["id"]}
    ]


def test_parallel_calls_come_although_they_are_disabled(answer):
    two = CALL.replace("<|call|>", "<|end|>") + NEXT + CALL
    choice = {"type": "auto", "disable_parallel_tool_use": "true"}
    for bite in (None, 1):
        got = answer(two, bite, tools=[tool(WEATHER)], tool_choice=choice)
        assert [block["type"] for block in got["content"]] == ["tool_use"]


def test_usage_counts_the_cache_twice(library, encoder, tokens):
    request = messages.read({"messages": MESSAGES, "max_tokens": 64})

    class Cached(Script):
        async def steps(self):
            async for step in super().steps():
                yield type(step)(step.pieces, cached_tokens=16)

    for details, usage in ((True, (84, 16)), (False, (100, 0))):
        facts = messages.Facts("msg_1", "gpt-oss", 100, cached_details=details)
        made = messages.Answer(request, facts, lambda: request.asked.turn(encoder))
        got = run(made, Cached(tokens(THOUGHT + FOUR), 1), whole=True)["usage"]
        assert (got["input_tokens"], got["cache_read_input_tokens"]) == usage
        assert got["output_tokens_details"]["thinking_tokens"] == 1


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a system text": ({"system": "Be brief."}, {"messages": [{"role": "system", "content": "Be brief."}, USER]}),
    "system blocks": (
        {"system": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "Be brief."}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
    ),
    "tools": ({"tools": [{"type": "custom", "cache_control": {}} | tool(WEATHER)]}, {"tools": [WEATHER]}),
    "no tools wanted": ({"tools": [tool(WEATHER)], "tool_choice": {"type": "none"}}, {}),
    "hosted tools": (
        {"tools": [{"type": "web_search_20250305", "name": "w"}, {"type": "tool_search_tool_20251119"}, tool(BASH)]},
        {"tools": [BASH]},
    ),
    "thinking disabled": ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "low"}),
    "the greatest effort": (
        {"thinking": {"type": "adaptive"}, "output_config": {"effort": "xhigh"}},
        {"reasoning_effort": "high"},
    ),
    "a prefill": (
        {"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "3 + "}]}]},
        {"messages": [USER, {"role": "assistant", "content": "3 + "}], "continue_final_message": True},
    ),
    "a system message between": (
        {"messages": [USER, {"role": "system", "content": [{"type": "text", "text": "Now in French."}]}, USER]},
        {"messages": [USER, {"role": "system", "content": "Now in French."}, USER]},
    ),
    "an error and its call": (
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm", "signature": "x"},
                        {"type": "redacted_thinking", "data": "x"},
                        {"type": "text", "text": "I look."},
                        PARIS,
                    ],
                },
                {"role": "user", "content": [RAINS | {"is_error": True, "content": [{"type": "text", "text": "no"}]}]},
            ]
        },
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "reasoning": "hm",
                    "content": "I look.",
                    "tool_calls": [{"id": "1", "function": {"name": "get_weather", "arguments": '{"city":"Paris"}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "Error: no"},
            ]
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_a_prompt_differs_from_the_same_chats_prompt(encoder, name):
    own, same = SAME[name]
    counted = messages.read({"messages": [USER], "model": "m"} | own, counting=True).asked.prompt(encoder)
    assert counted == chat.read({"messages": [USER]} | same).asked.prompt(encoder)


def prompt_text(library, encoder, sent: Sequence[Any], **fields: Any) -> str:
    asked = messages.read({"messages": sent, "max_tokens": 9} | fields).asked
    return library.decode(asked.prompt(encoder))


def test_blocks_that_hold_text_are_lost(library, encoder):
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "D"}}
    found = {"type": "search_result", "source": "S", "title": "U", "content": [{"type": "text", "text": "V"}]}
    result = RAINS | {"content": [found, {"type": "tool_reference", "tool_name": "bash"}]}
    sent = [{"role": "user", "content": [document]}, {"role": "assistant", "content": [PARIS]}]
    got = prompt_text(library, encoder, [*sent, {"role": "user", "content": [result, {"type": "text", "text": "W"}]}])
    for part in (
        "<|message|>T\nD<|end|>",
        "<|message|>U\nS\nV\nThe tool bash is available.<|end|>",
        "<|message|>W<|end|>",
    ):
        assert part in got


def test_a_malformed_call_comes_back_changed(library, encoder):
    sent = [USER, {"role": "assistant", "content": [PARIS | {"input": {"INVALID_JSON": '{"city":"Pa'}}]}]
    sent.append({"role": "user", "content": [RAINS | {"content": None}]})
    assert '<|message|>{"city":"Pa<|call|>' in prompt_text(library, encoder, sent)


def test_calls_that_share_an_id_lose_their_results_to_the_last(library, encoder):
    """anthropic-sdk-csharp issue 53."""
    asked = [USER, {"role": "assistant", "content": [PARIS, PARIS | {"name": "now"}]}]
    asked.append({"role": "user", "content": [RAINS, RAINS | {"content": "noon"}]})
    text = prompt_text(library, encoder, [*asked, *asked])
    for written in ("get_weather to=assistant<|channel|>commentary<|message|>rain<", "now to=assistant<|channel|>comm"):
        assert text.count(written) == 2


def test_a_strict_tool_is_not_enforced():
    asked = messages.read({"messages": [USER], "max_tokens": 9, "tools": [tool(BASH) | {"strict": True}]}).asked
    assert asked.tools.functions[0]["function"]["strict"] is True


def test_tools_of_the_conversation_are_not_offered(library, encoder):
    added = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": tool(BASH)}}
    removed = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}
    sent = [USER, {"role": "system", "content": [added, removed]}, USER]
    got = prompt_text(library, encoder, sent, tools=[tool(WEATHER)])
    assert ("type bash" in got, "get_weather" in got) == (True, False)
    added["tool"]["definition"] = tool(WEATHER) | {"description": "Another."}
    got = prompt_text(library, encoder, [USER, {"role": "system", "content": [added]}, USER], tools=[tool(WEATHER)])
    assert ("Another." in got, got.count("type get_weather")) == (True, 1)
    removed["tool"]["name"] = "no_such_tool"
    with pytest.raises(ConversationError, match=r"messages\[0\]\.content\[0\]\.tool\.name"):
        prompt_text(library, encoder, [{"role": "system", "content": [removed]}, USER], tools=[tool(WEATHER)])


def test_a_deferred_tool_is_shown_before_it_is_found(library, encoder):
    search, later = {"name": "ToolSearch", "input_schema": {}}, tool(WEATHER) | {"defer_loading": True}
    found = RAINS | {"content": [{"type": "tool_reference", "tool_name": "get_weather"}]}
    after = [USER, {"role": "assistant", "content": [PARIS]}, {"role": "user", "content": [found]}]
    added = {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "get_weather"}}
    shown = "type get_weather = "
    assert shown not in prompt_text(library, encoder, [USER], tools=[search, later])
    assert shown in prompt_text(library, encoder, after, tools=[search, later])
    assert shown in prompt_text(library, encoder, [USER, {"role": "system", "content": [added]}], tools=[search, later])
    for nobody_searches in ([later], [{"type": "tool_search_tool_bm25_20251119", "name": "s"}, later]):
        assert shown in prompt_text(library, encoder, [USER], tools=nobody_searches)


def test_an_image_in_a_result_ends_the_conversation(library, encoder):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
    sent = [
        USER,
        {"role": "assistant", "content": [PARIS]},
        {"role": "user", "content": [RAINS | {"content": [image]}]},
    ]
    assert "(an image, which this model cannot read)<|end|>" in prompt_text(library, encoder, sent)
    warnings = messages.read({"messages": sent, "max_tokens": 9}).asked.warnings
    assert warnings == ("messages[2].content[0].content[0] is left out: gpt-oss reads no block of type image",)


def test_a_reminder_outlives_its_turn(library, encoder):
    sent = [USER, {"role": "system", "content": "Hush.", "clear_at": "next_user_message"}]
    assert "Hush." in prompt_text(library, encoder, sent)
    assert "Hush." not in prompt_text(library, encoder, [*sent, USER])


def test_claude_code_cannot_tell_that_a_prompt_is_too_long(encoder):
    asked = messages.read({"messages": [USER], "max_tokens": 50}).asked
    length = len(asked.prompt(encoder))
    for limit, words in (
        (20, f"prompt is too long: {length} tokens > 20 maximum"),
        (length + 9, f"input length and `max_tokens` exceed context limit: {length} + 50 > {length + 9},"),
    ):
        with pytest.raises(ContextError) as raised:
            asked.prompt(encoder, limit)
        assert messages.context_words(raised.value).startswith(words)


def test_an_error_is_not_in_anthropics_form():
    wanted = {400: "invalid_request_error", 404: "not_found_error", 422: "invalid_request_error", 500: "api_error"}
    wanted |= {401: "authentication_error", 413: "request_too_large", 503: "overloaded_error", 501: "api_error"}
    for status, kind in wanted.items():
        body = {"type": "error", "error": {"type": kind, "message": "no"}}
        assert messages.error_body("no", status) == body
        assert messages.error_event("no", status) == f"event: error\ndata: {json.dumps(body)}\n\n"
