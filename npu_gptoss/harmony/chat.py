"""Chats in one object, for the offline engine and scripts: messages to token ids, generated ids back to channels."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai_harmony as harmony

from npu_gptoss.errors import InputError
from npu_gptoss.harmony.conversation import ConversationError, conversation
from npu_gptoss.harmony.encoding import Encoder, text_tokenizer
from npu_gptoss.harmony.parser import Kind, TolerantParser, kind_of, text_of
from npu_gptoss.harmony.vocabulary import BASE_VARIABLE, find_vocabulary


class ChatError(InputError):
    """A vocabulary that openai-harmony cannot load."""


@dataclass(frozen=True)
class Turn:
    """A message that the model wrote. channel: analysis, commentary or final; recipient: as `functions.name`."""

    channel: str | None
    recipient: str | None
    text: str
    role: harmony.Role | None = harmony.Role.ASSISTANT


@dataclass(frozen=True)
class Reply:
    """What the model wrote. `error` says where it left the format first, if it did; `turns` holds what can be read."""

    turns: tuple[Turn, ...]
    error: str | None = None

    def text(self, kind: Kind) -> str:
        """The text of all messages of a kind, each on lines of its own."""
        return "\n".join(t.text for t in self.turns if kind_of(t.role, t.channel, t.recipient) is kind)


class Chat:
    """The harmony encoding for a model directory."""

    def __init__(self, model_dir: Path) -> None:
        self._encoding = _load_encoding(model_dir)
        self._encoder = Encoder(self._encoding, text_tokenizer(Path(model_dir)))
        self.stop_token_ids = tuple(self._encoding.stop_tokens_for_assistant_actions())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str = "medium",
        date: str | None = None,
    ) -> list[int]:
        """Token ids up to and with `<|start|>assistant`. tools as in OpenAI's API; date YYYY-MM-DD, default today.

        Raises ConversationError, which names the message that cannot be written.
        """
        if not messages:
            raise ConversationError(f"messages must be a list of at least one message, got {messages!r:.80}")
        return self._encoder.encode(conversation(messages, tools=tools, effort=reasoning_effort, date=date))

    def parse(self, token_ids: Sequence[int]) -> Reply:
        """Generated ids, with or without their stop token; an unfinished last message counts."""
        parser = TolerantParser(self._encoding, harmony.Role.ASSISTANT)
        error = None
        for number, token in enumerate(token_ids):
            if parser.process(token).ignored_last_token and error is None:
                error = f"token {number} belongs to no message"
        turns = [Turn(m.channel, m.recipient, text_of(m), m.author.role) for m in parser.messages]
        if parser.in_content:
            channel, recipient = parser.current_channel, parser.current_recipient
            turns.append(Turn(channel, recipient, parser.current_content, parser.current_role))
        elif error is None and parser.in_header and token_ids:
            error = "the last message ends within its header"
        return Reply(tuple(turns), error)


def _load_encoding(model_dir: Path) -> harmony.HarmonyEncoding:
    # openai-harmony reads the folder from the environment and would else go to the network
    if not os.environ.get(BASE_VARIABLE) and (directory := find_vocabulary(model_dir)):
        os.environ[BASE_VARIABLE] = str(directory)
    try:
        return _encoding()
    except Exception as error:  # the binding raises bare exceptions, a missing vocabulary among them
        raise ChatError(
            f"openai-harmony cannot load its vocabulary ({error}): run `npu-gptoss vocabulary {model_dir}`, which "
            "rebuilds it from the checkpoint without a network"
        ) from error


@functools.cache
def _encoding() -> harmony.HarmonyEncoding:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
