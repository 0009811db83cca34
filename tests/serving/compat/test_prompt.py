"""Prompts: what the client says must reach the model in the form that it was trained on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.serving.compat.fake_engine import WEATHER, FakeEngine, chat, respond

pytestmark = pytest.mark.serving

CHAT = ("harmony-rendering", "chat-prompt", "harmony-parser")
RESPONSES = ("harmony-rendering", "responses-prompt", "harmony-parser")
USER = {"role": "user", "content": "Hello"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
RESULT = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>20 degrees<|end|>"
TOOLS = """# Tools

## functions

namespace functions {

// Get the weather
type get_weather = (_: {
city: string,
}) => any;

} // namespace functions"""


@pytest.fixture
def rendered(harmony):
    """The prompt of a request to an API after the system turn, and the system turn, as text; or the error's message."""

    def render(api: Any, **fields: Any) -> tuple[str, str]:
        engine = FakeEngine(harmony.encode("<|channel|>final<|message|>Hi.<|return|>", allowed_special="all"))
        answer = api(engine, **fields)
        if not engine.prompts:
            return answer["error"]["message"], str(answer["error"]["code"])
        text = harmony.decode(engine.prompts[0])
        system, rest = text.split("<|end|>", 1)
        return rest, system

    return render


def test_a_system_message_becomes_the_developers_instructions(patched, rendered):
    messages = [{"role": "system", "content": "Be brief."}, USER]
    with patched():
        prompt, _ = rendered(chat, messages=messages)
        assert prompt.startswith("<|start|>developer<|message|><|end|><|start|>system<|message|>Be brief.<|end|>")
    with patched(*CHAT):
        prompt, _ = rendered(chat, messages=messages)
    assert prompt == (
        "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
        "<|start|>user<|message|>Hello<|end|><|start|>assistant"
    )


def test_instructions_and_tools_share_one_developer_turn(patched, rendered):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": [{"type": "text", "text": "In "}, {"type": "text", "text": "English."}]},
        USER,
    ]
    with patched():
        assert rendered(chat, messages=messages, tools=[WEATHER])[0].count("<|start|>developer") == 2
    with patched(*CHAT):
        prompt, _ = rendered(chat, messages=messages, tools=[WEATHER])
    assert prompt == (
        f"<|start|>developer<|message|># Instructions\n\nBe brief.\n\nIn English.\n\n{TOOLS}<|end|>"
        "<|start|>user<|message|>Hello<|end|><|start|>assistant"
    )


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
    assert prompt.startswith(f"<|start|>developer<|message|>{TOOLS}<|end|><|start|>user")
    with patched(*RESPONSES):
        prompt, system = rendered(respond, instructions="Be brief.")
    assert "OpenAI.\nBe brief.\n" in system
    assert prompt.startswith("<|start|>user")


def test_a_tool_result_is_signed_by_its_function(patched, rendered):
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
    ]
    with patched():
        assert "<|start|>functions.<|channel|>commentary<|message|>20 degrees" in rendered(chat, messages=messages)[0]
    with patched(*CHAT):
        prompt, _ = rendered(chat, messages=messages, tools=[WEATHER])
    assert prompt.endswith(
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
        f"{RESULT}<|start|>assistant"
    )


def test_a_result_of_no_known_call_is_refused_in_words(patched, rendered):
    message = {"role": "tool", "tool_call_id": "call_9", "content": "20 degrees"}
    with patched(*CHAT):
        error, code = rendered(chat, messages=[USER, message])
        assert code == "400"
        assert "tool_call_id 'call_9', but no assistant message before it makes that call" in error
        prompt, _ = rendered(chat, messages=[USER, message | {"name": "get_weather"}])
    assert RESULT in prompt


def test_earlier_answers_have_their_channel(patched, rendered):
    messages = [USER, {"role": "assistant", "content": "Hi."}, USER]
    with patched():
        assert "<|start|>assistant<|message|>Hi.<|end|>" in rendered(chat, messages=messages)[0]
    with patched(*CHAT):
        assert "<|start|>assistant<|channel|>final<|message|>Hi.<|end|>" in rendered(chat, messages=messages)[0]


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_before_a_call_goes_back_to_the_model_until_it_has_answered(patched, rendered, field):
    turn = [
        USER,
        {"role": "assistant", "content": "Let me look.", field: "I need the weather.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "20 degrees"},
    ]
    with patched():
        assert "I need the weather." not in rendered(chat, messages=turn)[0]
    with patched(*CHAT):
        prompt, _ = rendered(chat, messages=turn)
        assert (
            "<|start|>assistant<|channel|>analysis<|message|>I need the weather.<|end|>"
            "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant to=functions"
        ) in prompt
        answered = [*turn, {"role": "assistant", "content": "20.", field: "So 20."}, USER]
        prompt, _ = rendered(chat, messages=answered)
    assert "I need the weather." not in prompt
    assert "So 20." not in prompt
    assert "<|channel|>final<|message|>20.<|end|>" in prompt


def test_tools_are_hidden_when_the_server_is_told_to_and_none_is_chosen(patched, rendered, monkeypatch):
    from vllm.entrypoints.openai.serving_chat import OpenAIServingChat

    with patched(*CHAT):
        assert "namespace functions" in rendered(chat, tools=[WEATHER], tool_choice="none")[0]
        monkeypatch.setattr(OpenAIServingChat, "exclude_tools_when_tool_choice_none", True, raising=False)
        serving_init = OpenAIServingChat.__init__

        def excluding(self, *args: Any, **kwargs: Any) -> None:
            serving_init(self, *args, exclude_tools_when_tool_choice_none=True, **kwargs)

        monkeypatch.setattr(OpenAIServingChat, "__init__", excluding)
        assert "namespace functions" not in rendered(chat, tools=[WEATHER], tool_choice="none")[0]
        assert "namespace functions" in rendered(chat, tools=[WEATHER])[0]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "a part of type 'image_url'"),
        ({"role": "narrator", "content": "Once"}, "needs a role of system, developer, user, assistant"),
    ],
)
def test_what_gpt_oss_cannot_read_is_refused_in_words(patched, rendered, message, expected):
    with patched(*CHAT):
        error, code = rendered(chat, messages=[message])
    assert code == "400"
    assert expected in error


def test_instructions_of_a_response_are_not_dropped(patched, rendered):
    with patched():
        assert "Be brief." not in "".join(rendered(respond, instructions="Be brief."))
    with patched(*RESPONSES):
        prompt, _ = rendered(respond, instructions="Be brief.")
        assert prompt == (
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|>"
            "<|start|>user<|message|>Hello<|end|><|start|>assistant"
        )
        tool = {"type": "function"} | WEATHER["function"]
        items = [{"role": "system", "content": "In English."}, USER]
        prompt, system = rendered(respond, instructions="Be brief.", tools=[tool], input=items)
    assert prompt.startswith(
        f"<|start|>developer<|message|># Instructions\n\nBe brief.\n\nIn English.\n\n{TOOLS}<|end|><|start|>user"
    )
    assert "analysis, commentary, final" in system


def test_a_system_item_of_a_response_becomes_the_developers_instructions(patched, rendered):
    items = [{"role": "system", "content": [{"type": "input_text", "text": "Be brief."}]}, USER]
    with patched():
        assert "<|start|>developer<|message|>Instructions:\nBe brief." in rendered(respond, input=items)[0]
    with patched(*RESPONSES):
        prompt, _ = rendered(respond, input=items)
    assert prompt.startswith("<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user")


def test_the_output_of_a_function_call_finds_its_call(patched, rendered):
    items = [
        USER,
        {"type": "reasoning", "id": "rs_0", "summary": [{"type": "summary_text", "text": "short"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "I need the weather."}],
        },
        {"type": "function_call", "call_id": "c", "id": "fc", "name": "get_weather", "arguments": '{"city": "Paris"}'},
        {"type": "function_call_output", "call_id": "c", "output": "20 degrees"},
    ]
    with patched():
        assert rendered(respond, input=[*items[:1], *items[3:]])[0].startswith("No call message found for c")
    with patched(*RESPONSES):
        prompt, _ = rendered(respond, input=items)
        assert prompt == (
            "<|start|>user<|message|>Hello<|end|>"
            "<|start|>assistant<|channel|>analysis<|message|>I need the weather.<|end|>"
            '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
            f"{RESULT}<|start|>assistant"
        )
        error, code = rendered(respond, input=[USER, items[-1]])
    assert code == "400"
    assert "send the function_call item before its output" in error


def test_a_conversation_of_responses_goes_through(patched, rendered):
    items = [
        USER,
        {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "status": "completed",
            "content": [{"type": "output_text", "text": "Hi.", "annotations": []}],
        },
        USER,
    ]
    with patched(*RESPONSES):
        prompt, _ = rendered(respond, input=items)
    assert "<|start|>assistant<|channel|>final<|message|>Hi.<|end|>" in prompt
