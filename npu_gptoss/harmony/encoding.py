"""harmony messages to token ids, in time linear in their length, and the checkpoint's own tokens to text.

Text is encoded by the checkpoint's own tokenizer.json, told to take the names of special tokens for text, so that no
message can write a control token. openai-harmony's tokenizer gives the same ids, but needs the square of the length of
a run of equal characters (openai/harmony issue 79), and holds Python's lock while it works; it stands in only where
there is no tokenizer.json.

Training may add tokens, or rename reserved ones. Their names in a text become these tokens, as in training, and the
parser of openai-harmony reads them through `Encoder.spelled`: it knows the published vocabulary only.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

from openai_harmony import HarmonyEncoding, Message
from tokenizers import Tokenizer

from npu_gptoss.errors import InputError
from npu_gptoss.harmony.conversation import ConversationError
from npu_gptoss.harmony.library import load_encoding
from npu_gptoss.harmony.parser import TolerantParser
from npu_gptoss.harmony.rendering import CHANNEL, CONTROL, MESSAGE, pieces
from npu_gptoss.harmony.vocabulary import LAST_SPECIAL_ID, SPECIAL_TOKENS, byte_characters, character_bytes
from npu_gptoss.tokenizer import check_template, load_tokenizer

LONGEST_TOKEN = 128  # characters; a run of spaces. tests/harmony looks at the whole vocabulary


class ContextError(ConversationError):
    """A prompt, or a prompt and the tokens asked for, that the model's context cannot hold."""


def check_length(limit: int, tokens: int, max_tokens: int | None = None, *, at_least: bool = False) -> None:
    """Raise ContextError unless a prompt of `tokens` and `max_tokens` more (or one) fit into `limit` tokens.

    Clients recognise these words and shorten the conversation.
    """
    if tokens < limit and tokens + (max_tokens or 0) <= limit:
        return
    count = f"at least {tokens}" if at_least else str(tokens)
    if tokens >= limit:
        got = f"your request has {count} input tokens. Please reduce the length of the input messages."
    else:
        got = (
            f"you requested {tokens + (max_tokens or 0)} tokens ({tokens} in the input, {max_tokens} in the "
            "completion). Please reduce the length of the input or of the completion."
        )
    raise ContextError(f"This model's maximum context length is {limit} tokens. However, {got}", None)


def check_characters(limit: int, characters: int) -> None:
    """The same before the text is encoded, for one that cannot fit because no token is longer than 128 characters."""
    if characters > LONGEST_TOKEN * limit:
        check_length(limit, -(-characters // LONGEST_TOKEN), at_least=True)


class Encoder:
    """Messages to token ids. `library` writes tools, `tokenizer` encodes text; without one the library does."""

    def __init__(self, library: HarmonyEncoding, tokenizer: Tokenizer | None = None) -> None:
        self._library = library
        self._tokenizer = tokenizer
        self._added = {} if tokenizer is None else tokenizer.get_added_tokens_decoder()
        self.spelled = functools.cache(self._spelled)

    def parser(self) -> TolerantParser:
        """A reader of a turn of the model."""
        return TolerantParser(self._library, self.spelled)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, with the names of special tokens."""
        if self._tokenizer is None:
            return self._library.decode(ids)
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token's text: it may begin or end within a character."""
        name = None if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if name is None or token in self._added:
            return self.decode([token]).encode()
        return bytes(map(character_bytes().__getitem__, name))

    def _spelled(self, token: int) -> tuple[int, ...]:
        """Tokens of the published vocabulary with the text of a special or added token; none for an unused id."""
        known = SPECIAL_TOKENS.get(token)
        name = known if self._tokenizer is None else self._tokenizer.id_to_token(token)
        if name is None or name == known:
            return (token,) if token <= LAST_SPECIAL_ID else ()
        if token in self._added:
            name = "".join(byte_characters()[byte] for byte in name.encode())
        return tuple(map(self._tokenizer.token_to_id, name))

    def encode(self, messages: Sequence[Message], limit: int | None = None) -> list[int]:
        """Token ids up to and with `<|start|>assistant`. `limit`: tokens of the context, if longer texts are refused.

        Other threads run while long texts are encoded, where there is a tokenizer.
        """
        parts = pieces(messages, self._library)
        texts = [part for part in parts if isinstance(part, str)]
        if limit is not None:
            check_characters(limit, sum(map(len, texts)))
        encoded = iter(self._encode_texts(texts))
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += next(encoded)
        return ids

    def text(self, text: str) -> list[int]:
        """Token ids of a text, in which names of control tokens are letters."""
        return self._encode_texts([text])[0]

    def header(self, channel: str) -> list[int]:
        """Token ids between `<|start|>assistant` and the text of a message on a channel."""
        return [CHANNEL, *self.text(channel), MESSAGE]

    def characters(self, messages: Sequence[Message]) -> int:
        """Counts the characters of the messages' texts, without system turn and tools; long texts go to a thread."""
        parts = [part for message in messages for part in message.content]
        texts = [getattr(part, "text", None) or getattr(part, "instructions", None) or "" for part in parts]
        spaces = [space for part in parts for space in (getattr(part, "tools", None) or {}).values()]
        return sum(map(len, texts)) + sum(len(tool.model_dump_json()) for space in spaces for tool in space.tools)

    def _encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:  # JSON can write one half of a surrogate pair
                raise ConversationError(f"the conversation holds a text that is not valid Unicode: {error}") from None
        if self._tokenizer is None:
            return [self._library.encode(text, disallowed_special=()) for text in texts]
        return [encoding.ids for encoding in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]


def load_encoder(directory: Path | None) -> Encoder:
    """The encoder of a checkpoint, made from its own files. Raises InputError when they cannot be used."""
    if directory is not None:
        check_template(directory)
    return Encoder(load_encoding(directory), None if directory is None else text_tokenizer(directory))


@functools.lru_cache(maxsize=4)
def text_tokenizer(directory: Path) -> Tokenizer | None:
    """tokenizer.json of a checkpoint, for text without special tokens; None when there is none.

    Raises InputError when it cannot be read, or is not gpt-oss's.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = load_tokenizer(path)
    for name, token in CONTROL.items():
        found = tokenizer.token_to_id(name)
        if found != token:
            raise InputError(
                f"{path} is not the tokenizer of gpt-oss: {name} should be token {token}, it is {found}. Get "
                "tokenizer.json from the original checkpoint.",
                field="tokenizer.json",
            )
    added = tokenizer.get_added_tokens_decoder()
    if any(token.special and SPECIAL_TOKENS.get(i) != token.content for i, token in added.items()):
        content = json.loads(tokenizer.to_str())  # tokens of training, which a text may name
        for token in content["added_tokens"]:
            token["special"] = SPECIAL_TOKENS.get(token["id"]) == token["content"]
        tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.encode_special_tokens = True
    return tokenizer
