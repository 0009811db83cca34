"""Turns of a model, well or badly spelled. tests/frontend/test_turn.py has any spelling, and any tokens."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

pytest.importorskip("openai_harmony")

from openai_harmony import HarmonyEncoding, Role, StreamableParser

from npu_gptoss.harmony.parser import TolerantParser, text_of


@dataclass(frozen=True)
class Written:
    """A message of the assistant: how its header begins, its header, text and end."""

    begin: str
    header: str
    text: str
    end: str

    @property
    def pieces(self) -> tuple[str, ...]:
        return self.begin, f"{self.header}<|message|>", self.text, self.end


def well_formed(draw: random.Random) -> list[Written]:
    """A turn: reasoning and preambles, then an answer or a call, or a cut-off end."""
    messages = []
    for number in range(draw.randrange(4)):
        channel = draw.choice(("analysis", "analysis", "commentary"))
        messages.append((f"<|channel|>{channel}", f"part {number} é {draw.randrange(9)}", "<|end|>"))
    last = draw.choice(("<|channel|>final", "<|channel|>commentary to=functions.f <|constrain|>json"))
    end = draw.choice(("<|return|>", "<|call|>", "")) if "final" in last else "<|call|>"
    messages.append((last, f'{{"answer": {draw.randrange(9)}, "日本": "\U0001f600"}}', end))
    return [
        Written("<|start|>assistant" if index else "", header, text, end)
        for index, (header, text, end) in enumerate(messages)
    ]


@functools.cache
def encoded(library: HarmonyEncoding, piece: str) -> list[int]:
    return library.encode(piece, allowed_special="all")


def tokens_of(library: HarmonyEncoding, pieces: Iterable[str]) -> list[int]:
    return [token for piece in pieces for token in encoded(library, piece)]


def read(library: HarmonyEncoding, tokens: list[int]) -> tuple[TolerantParser, str]:
    """The parser at the end, and the text that it emitted on the way."""
    parser, told = TolerantParser(library), ""
    for token in tokens:
        told += parser.process(token).last_content_delta or ""
    return parser, told


def test_well_formed_turns_are_read_like_the_strict_parser(library):
    draw = random.Random(2)
    for _ in range(1000):
        tokens = tokens_of(library, (piece for message in well_formed(draw) for piece in message.pieces))
        strict = StreamableParser(library, role=Role.ASSISTANT)
        ours, told, want = TolerantParser(library), [], []
        for token in tokens:
            told.append(ours.process(token).last_content_delta)
            want.append(strict.process(token).last_content_delta)
        assert told == want
        assert [m.to_dict() for m in ours.messages] == [m.to_dict() for m in strict.messages]


@pytest.mark.parametrize(
    ("text", "channel", "recipient", "found"),
    [
        ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "final", None, "b"),
        ("<|channel|>analysis<|message|>a<|end|>assistant<|channel|>final<|message|>b", "final", None, "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|><|channel|>final<|message|>b", "final", None, "b"),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|><|channel|>commentary to=functions.f<|message|>{}",
            "commentary",
            "functions.f",
            "{}",
        ),
        ("<|channel|><|message|>b", "final", None, "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant analysis x y z<|message|>b", "analysis", None, "b"),
        ("<|channel|>analysis<|message|>a<|end|><|start|>oops<|message|>b", "final", None, "b"),
    ],
)
def test_a_message_that_lacks_a_part_of_its_header_is_the_assistants(library, text, channel, recipient, found):
    parser, _ = read(library, library.encode(text, allowed_special="all"))
    assert parser.current_role is Role.ASSISTANT
    assert (parser.current_channel, parser.current_recipient, parser.current_content) == (channel, recipient, found)


@pytest.mark.parametrize("begin", ["", "<|channel|>analysis<|message|>a<|end|><|start|>assistant"])
@pytest.mark.parametrize(
    ("header", "channel", "recipient"),
    [
        ("<|channel|>final json", "final", None),
        ("<|channel|>final <|constrain|>json", "final", None),
        ("<|channel|>commentary <|constrain|>json", "commentary", None),
        ("<|channel|>commentary json", "commentary", None),
        ("<|channel|>analysis code", "analysis", None),
        (" to=functions.f<|channel|>final json", "final", "functions.f"),
        ("<|channel|>final to=functions.f json", "final", "functions.f"),
        ("<|channel|>commentary functions.f", "commentary", "functions.f"),
        ("<|channel|>commentary to=json", "commentary", "json"),
    ],
)
def test_a_format_behind_the_channel_is_no_recipient(library, begin, header, channel, recipient):
    parser, told = read(library, library.encode(f"{begin}{header}<|message|>{{}}", allowed_special="all"))
    assert (parser.current_channel, parser.current_recipient, told[-2:]) == (channel, recipient, "{}")
    assert parser.process_eos().messages[-1].recipient == recipient


def test_text_of_another_role_is_not_sent(library):
    text = "<|channel|>analysis<|message|>a<|end|><|start|>user<|channel|><|message|>b<|end|>"
    parser, told = read(library, library.encode(text, allowed_special="all"))
    assert (told, len(parser.messages)) == ("a", 1)


@pytest.mark.parametrize(
    ("text", "channel", "recipient", "content"),
    [
        ("Four.<|return|>", "final", None, "Four."),
        ("Four.", "final", None, "Four."),
        ("<|channel|>analysis<|message|>a<|end|> Four.<|return|>", "final", None, "Four."),
        ("<|channel|>analysis need more.<|return|>", "analysis", None, "need more."),
        ("<|channel|>analysis need more.<|start|>assistant", "analysis", None, "need more."),
        (
            '<|channel|>commentary to=functions.f <|constrain|>json{"a": 1}<|call|>',
            "commentary",
            "functions.f",
            '{"a": 1}',
        ),
        ("<|channel|>commentary to=functions.f<|constrain|>write: a<|end|>", "commentary", "functions.f", "write: a"),
        ("<|channel|>commentary to=functions.f<|channel|>commentary json{}<|call|>", "commentary", "functions.f", "{}"),
    ],
)
def test_text_of_a_message_that_ends_in_its_header_is_kept(library, text, channel, recipient, content):
    parser, _ = read(library, library.encode(text, allowed_special="all"))
    message = parser.process_eos().messages[-1]
    assert (message.channel, message.recipient, text_of(message).strip()) == (channel, recipient, content)


@pytest.mark.parametrize(
    ("header", "recipient"),
    [
        ("commentary to=functions.bash<|channel|>commentary<|constrain|>json", "functions.bash"),
        ("commentary to=functions.bash<|channel|>commentary <|constrain|>json", "functions.bash"),
        ("commentary to=functions.bash<|constrain|>json", "functions.bash"),
        ("commentary to=functions.bash <|constrain|>json", "functions.bash"),
    ],
)
def test_a_recipient_has_no_control_tokens(library, header, recipient):
    parser, _ = read(library, library.encode(f"<|channel|>{header}<|message|>{{}}<|call|>", allowed_special="all"))
    (message,) = parser.messages
    assert (message.channel, message.recipient, text_of(message)) == ("commentary", recipient, "{}")
