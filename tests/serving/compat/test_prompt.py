"""Prompts: what the client says must reach the model in the form that it was trained on.

tests/harmony/test_entrances.py compares the prompts of all entrances with each other and with the chat template.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.harmony.test_entrances import CONVERSATIONS, items
from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, flat, respond

pytestmark = pytest.mark.serving

CHAT = ("harmony-rendering", "chat-prompt", "harmony-parser")
RESPONSES = ("harmony-rendering", "responses-prompt", "harmony-parser")
USER = {"role": "user", "content": "Hello"}
OUTPUT = {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"}
HELLO, ASSISTANT = "<|start|>user<|message|>Hello<|end|>", "<|start|>assistant"
TOOLS = """# Tools

## functions

namespace functions {

// Get the weather
type get_weather = (_: {
city: string,
}) => any;

} // namespace functions"""


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


@pytest.mark.parametrize(
    ("api", "name", "written"),
    [
        (chat, "instructions", "<|start|>developer<|message|><|end|><|start|>system<|message|>Be brief.<|end|>"),
        (chat, "a call", "<|start|>functions.<|channel|>commentary<|message|>20 degrees"),
        (chat, "an answer", "<|start|>assistant<|message|>Sunny.<|end|>"),
        (respond, "instructions", "<|start|>developer<|message|>Instructions:\nBe brief."),
        (respond, "a call", "No call message found for c1"),
    ],
)
def test_stock_vllm_writes_prompts_that_the_model_does_not_know(patched, rendered, api, name, written):
    messages = CONVERSATIONS[name]["messages"]
    fields = {"messages": messages} if api is chat else {"input": items(messages)}
    with patched():
        assert written in rendered(api, **fields)[0]
    with patched(*CHAT, *RESPONSES):
        assert written not in rendered(api, **fields)[0]


def test_stock_vllm_drops_reasoning_before_a_call(patched, rendered):
    messages = CONVERSATIONS["a call after reasoning"]["messages"]
    with patched():
        assert "I look." not in rendered(chat, messages=messages)[0]
    with patched(*CHAT):
        assert "I look." in rendered(chat, messages=messages)[0]


def test_the_model_is_told_of_the_commentary_channel_with_tools_and_without(patched, rendered):
    with patched():
        assert "# Valid channels: analysis, final." in rendered(chat, tools=[WEATHER])[1]
    with patched(*CHAT):
        assert "# Valid channels: analysis, commentary, final." in rendered(chat, tools=[WEATHER])[1]
        assert "# Valid channels: analysis, commentary, final." in rendered(chat)[1]


def test_instructions_go_to_the_system_turn_when_vllm_is_told_so(patched, rendered, monkeypatch):
    monkeypatch.setenv("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS", "1")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "developer", "content": "In English."}, USER]
    with patched(*CHAT):
        prompt, system = rendered(chat, messages=messages, tools=[WEATHER])
    assert "OpenAI.\nBe brief.\n\nIn English.\n" in system
    assert prompt == f"<|start|>developer<|message|>{TOOLS}<|end|>{HELLO}{ASSISTANT}"
    with patched(*RESPONSES):
        prompt, system = rendered(respond, instructions="Be brief.")
    assert "OpenAI.\nBe brief.\n" in system
    assert prompt == HELLO + ASSISTANT


def test_instructions_of_a_response_are_not_dropped(patched, rendered):
    instructed = "<|start|>developer<|message|># Instructions\n\nBe brief."
    with patched():
        assert "Be brief." not in "".join(rendered(respond, instructions="Be brief."))
    with patched(*RESPONSES):
        assert rendered(respond, instructions="Be brief.")[0] == f"{instructed}<|end|>{HELLO}{ASSISTANT}"
        own = [{"role": "system", "content": "In English."}, USER]
        prompt, _ = rendered(respond, instructions="Be brief.", tools=[flat(WEATHER)], input=own)
    assert prompt == f"{instructed}\n\nIn English.\n\n{TOOLS}<|end|>{HELLO}{ASSISTANT}"


def test_items_as_a_client_sends_them_back_are_read(patched, rendered):
    summary = {"type": "reasoning", "id": "rs", "summary": [{"type": "summary_text", "text": "short"}]}
    content = [{"type": "output_text", "text": "Hi.", "annotations": []}]
    item = {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": content}
    with patched(*RESPONSES):
        prompt, _ = rendered(respond, input=[USER, summary, item, USER])
    assert prompt == f"{HELLO}{ASSISTANT}<|channel|>final<|message|>Hi.<|end|>{HELLO}{ASSISTANT}"


@pytest.mark.parametrize(
    ("api", "fields", "words"),
    [
        (chat, {"messages": [USER, OUTPUT]}, "no assistant message before it makes that call"),
        (
            chat,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "a part of type 'image_url'",
        ),
        (chat, {"messages": [{"role": "narrator", "content": "Once"}]}, "needs a role of system, developer, user"),
        (
            respond,
            {"input": [USER, {"type": "function_call_output", "call_id": "c", "output": "20"}]},
            "send the function_call item before its output",
        ),
    ],
    ids=["result of no call", "image", "role", "output of no call"],
)
def test_what_gpt_oss_cannot_read_is_refused_in_words(patched, rendered, api, fields, words):
    with patched(*CHAT, *RESPONSES):
        error, code = rendered(api, **fields)
    assert code == "400"
    assert words in error
