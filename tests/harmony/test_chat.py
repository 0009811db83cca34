"""harmony in and out: what the model reads is harmony's own rendering, and what it writes comes back by channel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.harmony import chat as chat_module
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, VOCABULARY_FILE
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary

SYSTEM = """<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-11-20

Reasoning: medium

# Valid channels: analysis, commentary, final. Channel must be included for every message.{calls}<|end|>"""


@pytest.fixture
def render(chat, library):
    """The prompt of messages as text."""
    return lambda *messages, **options: library.decode(chat.render(messages, date="2025-11-20", **options))


@pytest.fixture
def parsed(chat, library):
    """Channel, recipient and text of each message that a model wrote, and where it left the format."""

    def parse(text: str) -> tuple[list[tuple], str | None]:
        reply = chat.parse(library.encode(text, allowed_special="all"))
        return [(turn.channel, turn.recipient, turn.text) for turn in reply.turns], reply.error

    return parse


def user(text: str) -> dict:
    return {"role": "user", "content": text}


# In


def test_a_user_message_is_rendered_as_harmony_has_it(chat, library, render):
    expected = SYSTEM.format(calls="") + "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert render(user("Hi")) == expected
    assert chat.render([user("Hi")], date="2025-11-20") == library.encode(expected, allowed_special="all")


@pytest.mark.parametrize("name", ["get_weather", "functions.get_weather"])
def test_a_result_by_the_name_of_its_tool_is_that_tools(render, name):
    text = render(user("Weather?"), {"role": "tool", "name": name, "content": "3"})
    assert "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>3<|end|>" in text


@pytest.mark.parametrize("reasoning", ["reasoning_content", "reasoning"])
def test_a_tool_call_and_its_result_keep_the_tools_name(render, reasoning):
    """Servers call the reasoning by either name."""
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Oslo"}'}}
    text = render(
        user("Weather?"),
        {"role": "assistant", "content": None, reasoning: "I need it.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": '{"temp":3}'},
        tools=[{"type": "function", "function": {"name": "get_weather"}}],
    )
    head = SYSTEM.format(calls="\nCalls to these tools must go to the commentary channel: 'functions'.")
    assert text.startswith(head + "<|start|>developer<|message|># Tools\n\n## functions\n\nnamespace functions {")
    assert text.endswith(
        "<|start|>user<|message|>Weather?<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>I need it.<|end|>"
        "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
        '{"city":"Oslo"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>{"temp":3}<|end|>'
        "<|start|>assistant"
    )


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([], {}, "messages must be a list of at least one message"),
        ("Hi", {}, "messages must be a list"),
        (["Hi"], {}, "message 0 needs a role"),
        ([user("Hi"), {"role": "robot", "content": "x"}], {}, "message 1 needs a role of system"),
        ([{"role": "user"}], {}, r"message 0 \(user\) has no content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "a part of type 'image_url'"),
        ([{"role": "tool", "content": "x"}], {}, r"message 0 \(tool\) answers the tool_call_id None"),
        ([{"role": "assistant", "tool_calls": [{}]}], {}, r"message 0 \(assistant\): a tool call needs a function"),
        ([user("Hi")], {"tools": [{"name": "f"}]}, "tool 0 must be"),
        ([user("Hi")], {"tools": {}}, "tools must be a list"),
        (
            [user("Hi")],
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "cannot be written",
        ),
        ([{"role": "user", "content": 5}], {}, r"message 0 \(user\): content must be a text or a list of text parts"),
        (
            [{"role": "system", "content": "Be kind."}, user("Hi"), {"role": "user"}],
            {},
            r"message 2 \(user\) has no content",
        ),
        ([user("\ud800")], {}, "not valid Unicode"),
        ([user("Hi")], {"reasoning_effort": "huge"}, "reasoning_effort must be low, medium, high .*got 'huge'"),
        ([user("Hi")], {"date": "tomorrow"}, "the date must be written like 20"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_refused_in_words(chat, messages, options, message) -> None:
    with pytest.raises(ConversationError, match=message):
        chat.render(messages, **options)


# Out


REPLY = "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant<|channel|>final<|message|>3 + 4 = 7."


@pytest.mark.parametrize("end", ["<|return|>", "<|end|>", ""])
def test_channels_come_back_whole_or_cut_off(parsed, end):
    assert parsed(REPLY + end) == ([("analysis", None, "We add."), ("final", None, "3 + 4 = 7.")], None)


def test_a_tool_call_comes_back_with_its_recipient(parsed):
    text = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city":"Oslo"}<|call|>'
    assert parsed(text) == ([("commentary", "functions.get_weather", '{"city":"Oslo"}')], None)


def test_what_was_understood_survives_what_was_not(chat, parsed):
    """ignore_eos goes on past <|return|>, and random weights write no harmony at all."""
    turns, error = parsed(REPLY + "<|return|> and more")
    assert [text for _, _, text in turns] == ["We add.", "3 + 4 = 7."]
    assert error == "token 21 belongs to no message"
    turns, error = parsed(REPLY + "<|end|><|start|>assistant<|channel|>comm")
    assert len(turns) == 2
    assert error == "the last message ends within its header"
    assert parsed("no header") == ([], "the last message ends within its header")
    assert chat.parse([]).error is None
    assert chat.parse([201_087, 5]).turns == ()


def test_answers_end_at_return_and_call(chat):
    assert set(chat.stop_token_ids) == {200_002, 200_012}


# The vocabulary


def chat_in_a_new_process(model_dir: Path) -> subprocess.CompletedProcess[str]:
    """The encoding is loaded once a process. The proxy leads nowhere: nothing may come from the network."""
    code = "import pathlib, sys; from npu_gptoss.harmony.chat import Chat; Chat(pathlib.Path(sys.argv[1])); print('ok')"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("TIKTOKEN")}
    dead_end = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY"), "http://127.0.0.1:9")
    empty = {"TMPDIR": str(model_dir), "XDG_CACHE_HOME": str(model_dir / "cache")}
    command = [sys.executable, "-c", code, str(model_dir)]
    return subprocess.run(command, env={**kept, **dead_end, **empty}, capture_output=True, text=True, timeout=60)


def test_the_models_own_vocabulary_is_found_without_a_network(chat, tmp_path):
    (tmp_path / VOCABULARY_FILE).write_bytes(packaged_vocabulary())
    done = chat_in_a_new_process(tmp_path)
    assert done.stdout == "ok\n", done.stderr


def test_a_vocabulary_that_the_user_chose_is_not_exchanged_for_the_models(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(chat_module, "_encoding", lambda: "loaded")
    monkeypatch.setattr(chat_module, "find_vocabulary", lambda model_dir: tmp_path)
    monkeypatch.setenv(BASE_VARIABLE, "/chosen")
    assert chat_module._load_encoding(tmp_path) == "loaded"
    assert os.environ[BASE_VARIABLE] == "/chosen"
    monkeypatch.delenv(BASE_VARIABLE)
    assert chat_module._load_encoding(tmp_path) == "loaded"
    assert os.environ[BASE_VARIABLE] == str(tmp_path)


def test_a_missing_vocabulary_is_a_sentence_with_the_remedy(tmp_path: Path) -> None:
    done = chat_in_a_new_process(tmp_path)
    assert done.returncode != 0
    assert "ChatError: openai-harmony cannot load its vocabulary" in done.stderr
    assert f"run `npu-gptoss vocabulary {tmp_path}`" in done.stderr
