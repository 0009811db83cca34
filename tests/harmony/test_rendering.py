"""Our framing and the checkpoint's tokenizer give openai-harmony's token ids for all texts, and quickly."""

from __future__ import annotations

import gc
import json
import random
import re
import time
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

import openai_harmony as harmony
from tokenizers import Tokenizer, models

from npu_gptoss.harmony.conversation import (
    ConversationError,
    developer_message,
    said,
    system_message,
    tool_call,
    tool_result,
)
from npu_gptoss.harmony.encoding import LONGEST_TOKEN, ContextError, Encoder, check_length, text_tokenizer
from npu_gptoss.harmony.rendering import LONGEST_SHOWN, tools_section
from npu_gptoss.harmony.vocabulary import parse_ranks
from npu_gptoss.tiny.tokenizer_files import packaged_vocabulary
from tests.harmony.conftest import conversation
from tests.refused import refused

RUNS = ("a", "-", "\n", " ", "=", "0", "é", "漢", "🙂", "\t", "\r\n", "<|", "/", "́")
NAMES = ("start", "end", "message", "channel", "call", "return", "endoftext", "reserved_200013")
SPECIALS = tuple(f"<|{name}|>" for name in NAMES)
WORDS = ("The quick", " brown", "'s", "don't ", "naïve", "Straße ", "北京", "🏳️‍🌈", "1234567 ", "null")
ODD = ("\u202e", "\u0000", "\x7f", "  \n", '"', "\\", "\ue000")
CHARACTERS = (range(32, 127), range(0xD800), range(0xE000, 0x110000))


def text(rng: random.Random, most: int = 12) -> str:
    parts = []
    for _ in range(rng.randrange(most)):
        kind = rng.random()
        if kind < 0.4:
            parts.append(rng.choice(WORDS + ODD))
        elif kind < 0.6:
            parts.append(rng.choice(RUNS) * rng.randrange(1, 150))
        elif kind < 0.75:
            parts.append(rng.choice(SPECIALS))
        else:
            parts.append("".join(chr(rng.choice(rng.choice(CHARACTERS))) for _ in range(9)))
    return "".join(parts)


def schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A JSON schema with all that openai-harmony looks at, and things that it does not."""
    kind = rng.choice(("string", "number", "integer", "boolean", "array", "object", ["string", "null"], "odd", None))
    found: dict[str, Any] = {} if kind is None else {"type": kind}
    for name in ("title", "description"):
        if rng.random() < 0.4:
            found[name] = text(rng, 4)
    if rng.random() < 0.2:
        found["nullable"] = True
    if rng.random() < 0.2:
        found["examples"] = [text(rng, 3), 5]
    if rng.random() < 0.3:
        found["default"] = rng.choice((text(rng, 4), 3, 2.5, None, True, [text(rng, 6)], {text(rng, 3): text(rng, 9)}))
    if rng.random() < 0.25:
        found["enum"] = [text(rng, 3), text(rng, 3)]
    if depth < 3 and rng.random() < 0.2:
        found["oneOf"] = [schema(rng, depth + 1) for _ in range(rng.randrange(3))]
    if kind == "array" and rng.random() < 0.7 and depth < 3:
        found["items"] = schema(rng, depth + 1)
    if kind == "object" and depth < 3:
        found |= properties(rng, depth + 1)
    return found


def properties(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    names = [rng.choice(("default", "properties", "city", "x" * 90, text(rng, 3))) for _ in range(rng.randrange(1, 4))]
    return {
        "type": "object",
        "properties": {name: schema(rng, depth) for name in names},
        "required": rng.sample(names, rng.randrange(len(names))),
    }


def tool(rng: random.Random) -> dict[str, Any]:
    function = {"name": rng.choice(("f", "g" * 80)), "description": text(rng), "parameters": properties(rng)}
    return {"type": "function", "function": function}


def turns(rng: random.Random) -> list[Any]:
    """A conversation with any text in every place that a client's text can reach. Names are words: no client's text."""
    found = [system_message("high"), developer_message(text(rng), [tool(rng) for _ in range(rng.randrange(3))])]
    for _ in range(rng.randrange(5)):
        found.append(
            rng.choice(
                (
                    harmony.Message.from_role_and_content(harmony.Role.USER, text(rng)),
                    said(text(rng), "commentary"),
                    tool_call(text(rng, 3), text(rng)),
                    tool_result(rng.choice(("f", "get_weather")), text(rng)),
                    said(text(rng), "commentary").with_content_type("<|constrain|>json"),
                    developer_message(text(rng)),
                )
            )
        )
    return found


@pytest.mark.parametrize("seed", range(60))
def test_ids_equal_openai_harmony(encoder, library, seed):
    rng = random.Random(seed)
    messages = turns(rng)
    theirs = library.render_conversation_for_completion(
        harmony.Conversation.from_messages(messages), harmony.Role.ASSISTANT
    )
    ours = encoder.encode(messages)
    assert library.decode(ours) == library.decode(theirs)
    assert ours == theirs


@pytest.mark.parametrize("seed", range(20))
def test_the_library_as_tokenizer_gives_the_same_ids(encoder, library, seed):
    messages = turns(random.Random(1000 + seed))
    assert Encoder(library).encode(messages) == encoder.encode(messages)


def test_long_texts_in_a_tool_come_back_as_the_library_writes_them(library):
    """Each place of a schema alone: above the replaced length, with characters that JSON and comments change."""
    long = 'say "null"\\ \n\r\nand 🙂 ' + "x" * LONGEST_SHOWN
    for place in ("title", "description", "default", "nested default", "examples", "enum", "name", "tool", "variant"):
        field: dict[str, Any] = {"type": "string", "nullable": True}
        description, name = "short", "field"
        if place == "nested default":
            field["default"] = [{long: long}]
        elif place in ("examples", "enum"):
            field[place] = [long]
        elif place == "variant":
            field = {"oneOf": [{"type": "string", "description": long, "default": long}], "description": long}
        elif place == "name":
            name = long
        elif place == "tool":
            description = long + "\n\nend\n"
        else:
            field[place] = long
        parameters = {"type": "object", "properties": {name: field}, "required": [name]}
        content = harmony.DeveloperContent.new().with_function_tools(
            [harmony.ToolDescription.new("f", description, parameters)]
        )
        message = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)
        theirs = library.decode_utf8(library.render(message))
        assert f"<|start|>developer<|message|>{tools_section(content.tools, library)}<|end|>" == theirs, place


@pytest.mark.parametrize("place", ["user", "system", "developer", "tool", "argument", "result", "description"])
def test_no_text_can_write_a_control_token(encoder, place):
    def prompt(words: str) -> list[int]:
        call = {"id": "c", "function": {"name": "f", "arguments": words if place == "argument" else "{}"}}
        field = {"type": "string", "description": words if place == "description" else "d"}
        parameters = {"type": "object", "properties": {"x": field}}
        described = {"name": "f", "description": words if place == "tool" else "d", "parameters": parameters}
        messages = [
            {"role": "system", "content": words if place == "system" else "s"},
            {"role": "user", "content": words if place == "user" else "u"},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": words if place == "result" else "r"},
            {"role": "developer", "content": words if place == "developer" else "d"},
        ]
        return encoder.encode(conversation(messages, tools=[{"type": "function", "function": described}]))

    control = [token for token in prompt("plain") if token > 199_997]
    assert [token for token in prompt("".join(SPECIALS)) if token > 199_997] == control


@pytest.mark.parametrize("run", ["a", "-", "\n", " ", "🙂", "="])
def test_a_run_of_one_character_takes_no_second(encoder, run):
    parameters = {"type": "object", "properties": {run * 20_000: {"title": run * 20_000}}}
    described = {"name": "f", "description": run * 50_000, "parameters": parameters}
    messages = [{"role": "user", "content": run * 100_000}]
    start = time.process_time()
    ids = encoder.encode(conversation(messages))
    assert time.process_time() - start < 1.0
    assert len(ids) > 100
    start = time.process_time()
    encoder.encode(conversation(messages[:0], tools=[{"type": "function", "function": described}]))
    assert time.process_time() - start < 1.5


def test_tools_leave_nothing_in_the_cache_of_expressions(encoder):
    """One expression for each request displaced the others', and memory grew until 512 of them were kept."""

    def rendered() -> int:
        encoder.encode(
            conversation([], tools=[{"type": "function", "function": {"name": "f", "description": "d" * 99}}])
        )
        return sum(type(found) is re.Pattern for found in gc.get_objects())

    assert rendered() == rendered()


def test_no_token_is_longer_than_the_bound_on_lengths_assumes():
    longest = max(len(token.decode("utf-8", "replace")) for token in parse_ranks(packaged_vocabulary()))
    assert longest == LONGEST_TOKEN


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(encoder, library, monkeypatch):
    messages = conversation([{"role": "user", "content": " " * (LONGEST_TOKEN * 100 + 1)}])
    monkeypatch.setattr(Encoder, "_encode_texts", lambda self, texts: pytest.fail("the text was encoded"))
    with pytest.raises(ContextError, match=r"maximum context length is 100 tokens\. However, .* at least 10\d input"):
        encoder.encode(messages, limit=100)


@pytest.mark.parametrize(
    ("tokens", "max_tokens", "numbers"),
    [(100, None, ("100",)), (150, 3, ("150",)), (99, 2, ("101", "99", "2")), (90, 11, ("101", "90", "11"))],
)
def test_conversation_beyond_the_context_is_refused_with_numbers(tokens, max_tokens, numbers):
    check_length(100, 99, None)
    check_length(100, 90, 10)
    with pytest.raises(ContextError) as refusal:
        check_length(100, tokens, max_tokens)
    said = str(refusal.value)
    assert said.startswith("This model's maximum context length is 100 tokens. However, ")
    assert all(number in said for number in numbers)


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(encoder):
    half = json.loads('"\\ud800"')
    described = {"type": "function", "function": {"name": "f", "description": half}}
    for messages, tools in (([{"role": "user", "content": half}], []), ([], [described])):
        with pytest.raises(ConversationError):
            encoder.encode(conversation(messages, tools=tools))


def test_another_models_tokenizer_is_refused(tmp_path):
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with refused("tokenizer.json"):
        text_tokenizer(tmp_path)
    assert text_tokenizer(tmp_path / "nothing") is None
