"""Prompts: what the client says must reach the model in the form that it was trained on.

tests/harmony/test_entrances.py compares the prompts of all entrances with each other.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, flat, respond

pytestmark = pytest.mark.serving

CHAT = ("harmony-rendering", "chat-prompt", "harmony-parser")
RESPONSES = ("harmony-rendering", "responses-prompt", "harmony-parser")
USER = {"role": "user", "content": "Hello"}
BRIEF = {"role": "system", "content": "Be brief."}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
OUTPUT = {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"}
CALL_ITEM = {"type": "function_call", "call_id": "c", "id": "fc", "name": "get_weather"} | {
    "arguments": '{"city": "Paris"}'
}
OUTPUT_ITEM = {"type": "function_call_output", "call_id": "c", "output": "20 degrees"}
REASONING_ITEMS = [
    {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "short"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}]},
]
TOOLS = """# Tools

## functions

namespace functions {

// Get the weather
type get_weather = (_: {
city: string,
}) => any;

} // namespace functions"""

HELLO, ASSISTANT = "<|start|>user<|message|>Hello<|end|>", "<|start|>assistant"
INSTRUCTED = "<|start|>developer<|message|># Instructions\n\nBe brief."
CALLED = '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
RESULT = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20 degrees<|end|>"


def said(channel: str, text: str) -> str:
    return f"{ASSISTANT}<|channel|>{channel}<|message|>{text}<|end|>"


def looked(reasoning: str) -> list[dict[str, Any]]:
    return [USER, {"role": "assistant", "content": "Let me look.", reasoning: "I look.", "tool_calls": [CALL]}, OUTPUT]


LOOKED = said("analysis", "I look.") + said("commentary", "Let me look.") + CALLED + RESULT
# api, request, what stock vLLM writes (a part of it) or answers, and our prompt after the system turn
PROMPTS = {
    "a system message": (
        chat,
        {"messages": [BRIEF, USER]},
        "<|start|>developer<|message|><|end|><|start|>system<|message|>Be brief.<|end|>",
        INSTRUCTED + "<|end|>" + HELLO,
    ),
    "instructions and tools": (
        chat,
        {
            "messages": [
                *(BRIEF, {"role": "developer", "content": [{"type": "text", "text": x} for x in ("In ", "English.")]}),
                USER,
            ],
            "tools": [WEATHER],
        },
        f"{TOOLS}<|end|><|start|>system",
        f"{INSTRUCTED}\n\nIn English.\n\n{TOOLS}<|end|>{HELLO}",
    ),
    "a tool result": (
        chat,
        {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, OUTPUT]},
        "<|start|>functions.<|channel|>commentary<|message|>20 degrees",
        HELLO + CALLED + RESULT,
    ),
    "an earlier answer": (
        chat,
        {"messages": [USER, {"role": "assistant", "content": "Hi."}, USER]},
        "<|start|>assistant<|message|>Hi.<|end|>",
        HELLO + said("final", "Hi.") + HELLO,
    ),
    "reasoning": (chat, {"messages": looked("reasoning_content")}, "", HELLO + LOOKED),
    "reasoning by its other name": (chat, {"messages": looked("reasoning")}, "", HELLO + LOOKED),
    "reasoning that an answer followed": (
        chat,
        {"messages": [*looked("reasoning"), {"role": "assistant", "content": "20.", "reasoning": "So 20."}, USER]},
        "",
        HELLO + said("commentary", "Let me look.") + CALLED + RESULT + said("final", "20.") + HELLO,
    ),
    "instructions of a response": (respond, {"instructions": "Be brief."}, "", INSTRUCTED + "<|end|>" + HELLO),
    "instructions and tools of a response": (
        respond,
        {
            "instructions": "Be brief.",
            "tools": [flat(WEATHER)],
            "input": [{"role": "system", "content": "In English."}, USER],
        },
        "<|start|>developer<|message|>Instructions:\nIn English.",
        f"{INSTRUCTED}\n\nIn English.\n\n{TOOLS}<|end|>{HELLO}",
    ),
    "a system item": (
        respond,
        {"input": [{"role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}, USER]},
        "<|start|>developer<|message|>Instructions:\nBe brief.",
        INSTRUCTED + "<|end|>" + HELLO,
    ),
    "a function's output": (
        respond,
        {"input": [USER, CALL_ITEM, OUTPUT_ITEM]},
        "No call message found for c",
        HELLO + CALLED + RESULT,
    ),
    "a function's output after reasoning": (
        respond,
        {"input": [USER, *REASONING_ITEMS, CALL_ITEM, OUTPUT_ITEM]},
        "",
        HELLO + said("analysis", "I look.") + CALLED + RESULT,
    ),
}


@pytest.fixture
def rendered(tokens, harmony):
    """The prompt of a request to an API after the system turn, and the system turn, as text; or the error's message."""

    def render(api: Any, **fields: Any) -> tuple[str, str]:
        engine = FakeEngine(tokens("<|channel|>final<|message|>Hi.<|return|>"))
        answer = api(engine, **fields)
        if not engine.prompts:
            return answer["error"]["message"], str(answer["error"]["code"])
        system, rest = harmony.decode(engine.prompts[0]).split("<|end|>", 1)
        return rest, system

    return render


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_is_in_the_form_that_the_model_knows(patched, rendered, name):
    api, fields, stock, expected = PROMPTS[name]
    with patched():
        prompt, _ = rendered(api, **fields)
        assert stock in prompt
        assert prompt != expected + ASSISTANT
    with patched(*(CHAT if api is chat else RESPONSES)):
        prompt, system = rendered(api, **fields)
    assert prompt == expected + ASSISTANT
    assert "# Valid channels: analysis, commentary, final." in system


def test_the_model_is_told_of_the_commentary_channel_with_tools_and_without(patched, rendered):
    with patched():
        assert "# Valid channels: analysis, final." in rendered(chat, tools=[WEATHER])[1]
    with patched(*CHAT):
        assert "# Valid channels: analysis, commentary, final." in rendered(chat, tools=[WEATHER])[1]


def test_instructions_go_to_the_system_turn_when_vllm_is_told_so(patched, rendered, monkeypatch):
    monkeypatch.setenv("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS", "1")
    messages = [BRIEF, {"role": "developer", "content": "In English."}, USER]
    with patched(*CHAT):
        prompt, system = rendered(chat, messages=messages, tools=[WEATHER])
    assert "OpenAI.\nBe brief.\n\nIn English.\n" in system
    assert prompt == f"<|start|>developer<|message|>{TOOLS}<|end|>{HELLO}{ASSISTANT}"
    with patched(*RESPONSES):
        prompt, system = rendered(respond, instructions="Be brief.")
    assert "OpenAI.\nBe brief.\n" in system
    assert prompt == HELLO + ASSISTANT


@pytest.mark.parametrize(
    ("api", "fields", "words"),
    [
        (
            chat,
            {"messages": [USER, OUTPUT]},
            "tool_call_id 'call_1', but no assistant message before it makes that call",
        ),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "a part of type 'image_url'",
        ),
        (chat, {"messages": [{"role": "narrator", "content": "Once"}]}, "needs a role of system, developer, user"),
        (respond, {"input": [USER, OUTPUT_ITEM]}, "send the function_call item before its output"),
    ],
    ids=["result of no call", "image", "role", "output of no call"],
)
def test_what_gpt_oss_cannot_read_is_refused_in_words(patched, rendered, api, fields, words):
    with patched(*CHAT, *RESPONSES):
        error, code = rendered(api, **fields)
    assert code == "400"
    assert words in error


def test_an_answer_among_the_items_of_a_response_has_its_channel(patched, rendered):
    content = [{"type": "output_text", "text": "Hi.", "annotations": []}]
    item = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content}
    with patched(*RESPONSES):
        assert rendered(respond, input=[USER, item, USER])[0] == HELLO + said("final", "Hi.") + HELLO + ASSISTANT
