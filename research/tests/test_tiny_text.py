"""tiny_text renders prompts and replies as openai-harmony does, token for token."""

from __future__ import annotations

import random
from typing import Any

import pytest

from npu_gptoss.harmony.vocabulary import VOCABULARY_FILE
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from research.tiny_data import make_example, random_style
from research.tiny_text import STOPS, Reply, Style, parse_reply, render_prompt, render_reply, render_tools

harmony = pytest.importorskip("openai_harmony")


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("bpe_openai")
    directory = tmp_path_factory.mktemp("vocabulary")
    (directory / VOCABULARY_FILE).write_bytes(packaged_vocabulary())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(directory))
        yield harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def with_openai_harmony(encoding: Any, example: Any, style: Style) -> list[int]:
    """Builds the conversation as vLLM builds it from a chat request."""
    message, role = harmony.Message, harmony.Role
    system = harmony.SystemContent.new().with_conversation_start_date(style.date)
    system = system.with_reasoning_effort(harmony.ReasoningEffort(example.reasoning_effort.capitalize()))
    if not style.commentary:
        system = system.with_channel_config(harmony.ChannelConfig.require_channels(["analysis", "final"]))
    turns = [message.from_role_and_content(role.SYSTEM, system)]
    messages = list(example.messages)
    developer = harmony.DeveloperContent.new()
    instructed = messages[0]["role"] == "system"
    if instructed:
        developer = developer.with_instructions(messages.pop(0)["content"])
    if example.tools:
        tools = [harmony.ToolDescription.new(**tool["function"]) for tool in example.tools]
        developer = developer.with_function_tools(tools)
    if instructed or example.tools or style.empty_developer:
        turns.append(message.from_role_and_content(role.DEVELOPER, developer))
    called = ""
    for m in messages:
        if m["role"] == "tool":
            name, _, recipient = style.tool_author.format(name=called).partition(" to=")
            turn = message.from_author_and_content(harmony.Author.new(role.TOOL, name), m["content"])
            turn = turn.with_channel("commentary")
            turns.append(turn.with_recipient(recipient) if recipient else turn)
        elif m.get("tool_calls"):
            function = m["tool_calls"][0]["function"]
            called = function["name"]
            turn = message.from_role_and_content(role.ASSISTANT, function["arguments"]).with_channel("commentary")
            turns.append(turn.with_recipient(f"functions.{called}").with_content_type("json"))
        elif m["role"] == "assistant":
            turn = message.from_role_and_content(role.ASSISTANT, m["content"])
            turns.append(turn.with_channel("final") if style.final_channel else turn)
        else:
            turns.append(message.from_role_and_content(role.USER, m["content"]))
    conversation = harmony.Conversation.from_messages(turns)
    return encoding.render_conversation_for_completion(conversation, role.ASSISTANT)


def test_prompts_equal_openai_harmony_in_every_style(encoding):
    rng = random.Random(0)
    for _ in range(300):
        example, style = make_example(rng), random_style(rng)
        ours = encoding.encode(example.prompt(style), allowed_special="all")
        theirs = with_openai_harmony(encoding, example, style)
        assert encoding.decode_utf8(ours) == encoding.decode_utf8(theirs)
        assert ours == theirs


def test_replies_are_parsed_by_openai_harmony(encoding):
    rng = random.Random(1)
    for _ in range(100):
        example = make_example(rng)
        ids = encoding.encode(example.completion(), allowed_special="all")
        turns = encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT)
        assert turns[0].channel == "analysis"
        assert turns[0].content[0].text == example.reply.analysis
        if example.reply.call_name:
            assert turns[1].channel == "commentary"
            assert turns[1].recipient == f"functions.{example.reply.call_name}"
            assert turns[1].content[0].text == example.reply.call_arguments
        else:
            assert turns[1].channel == "final"
            assert turns[1].content[0].text == example.reply.content


@pytest.mark.parametrize("reply", [Reply("Why.", "What."), Reply("Why.", "", "get_weather", '{"city":"Paris"}')])
def test_reply_survives_a_round_trip(reply):
    assert parse_reply(render_reply(reply)) == reply


def test_cut_or_odd_replies_parse_without_an_error():
    assert parse_reply("") == Reply()
    assert parse_reply("<|channel|>analysis<|message|>Half of a thou") == Reply("Half of a thou")
    assert parse_reply("<|channel|>final<|message|>Yes.<|return|>junk") == Reply("", "Yes.")

    for stop in STOPS:
        assert parse_reply(f"<|channel|>final<|message|>Yes.{stop}").content == "Yes."


def test_tools_with_arguments_of_every_type_equal_openai_harmony(encoding):
    properties = {name: {"type": name, "description": f"of type {name}"} for name in ("integer", "number", "string")}
    properties |= {"flag": {"type": "boolean"}, "unit": {"type": "string", "enum": ["C", "F"]}}
    parameters = {"type": "object", "properties": properties, "required": ["integer", "unit"]}
    tools = [{"name": "measure", "description": "Measures.", "parameters": parameters}]
    content = harmony.DeveloperContent.new().with_function_tools(
        [harmony.ToolDescription.new(**tool) for tool in tools]
    )
    turn = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)
    theirs = encoding.decode_utf8(encoding.render_conversation(harmony.Conversation.from_messages([turn])))
    assert render_tools(tools) in theirs


@pytest.mark.parametrize("role", ["system", "developer"])
def test_first_system_message_becomes_developer_instructions(role):
    prompt = render_prompt([{"role": role, "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert prompt.count("<|start|>system") == 1
    assert "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|>" in prompt
