"""From the model's tokens to answers: a harmony parser that does not give up, and one rule for what a message is.

The format is the harmony guide's: messages `<|start|>{role}{header}<|message|>{content}` that end with `<|end|>`,
`<|call|>` (a tool call: the turn is over) or `<|return|>` (an answer: the turn is over). openai-harmony's parser raises
HarmonyError at the first token that does not fit. It happens in every load test, because `ignore_eos` makes the model
go on past `<|return|>`, and now and then in headers that the model spells badly.
"""

from __future__ import annotations

import enum
import functools
import logging
import re

from openai_harmony import HarmonyEncoding, HarmonyError, Message, Role, StreamableParser, StreamState

logger = logging.getLogger(__name__)

TOOL_PREFIX = "functions."
# what stands behind a channel and is no recipient: a format, as in `final json`
_FORMAT = re.compile(r"<\|channel\|>((analysis|final)\s+(?!functions\.)\S+|commentary\s*(<\|constrain\|>|\s)json)\s*$")


class Kind(enum.Enum):
    """What a message of the assistant is to the client."""

    REASONING = "analysis"
    ANSWER = "final"
    CALL = "commentary"


def kind_of(role: Role | str | None, channel: str | None, recipient: str | None) -> Kind | None:
    """The kind of a message from its header; None for what is not the assistant's.

    A recipient `functions.*` makes a tool call on any channel. `commentary` without a recipient is a preamble, which
    the harmony guide means for the user, as is text without a channel. What goes to another recipient (a built-in tool
    that is not there) is told as reasoning.
    """
    if role is None or Role(role) is not Role.ASSISTANT:
        return None
    if recipient is not None and recipient.startswith(TOOL_PREFIX):
        return Kind.CALL
    if channel == "final":
        return Kind.ANSWER
    if recipient is not None or (channel or "").startswith("analysis"):  # models do write "analysis–"
        return Kind.REASONING
    return Kind.ANSWER


def kind_of_message(message: Message) -> Kind | None:
    return kind_of(message.author.role, message.channel, message.recipient)


def text_of(message: Message) -> str:
    return "".join(getattr(part, "text", "") for part in message.content)


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # after a message: only <|start|> means anything, or the <|channel|> of one that left it out
    HEADER = enum.auto()
    CONTENT = enum.auto()
    OVER = enum.auto()  # the turn has ended: nothing means anything


@functools.cache
def _tokens(encoding: HarmonyEncoding, text: str) -> tuple[int, ...]:
    """Of the few texts of the format itself: encoding one takes a millisecond."""
    return tuple(encoding.encode(text, allowed_special="all"))


class TolerantParser(StreamableParser):
    """openai-harmony's parser that never raises and never loses text that it has read.

    Tokens between messages and after the end of the turn are dropped; a message may begin with its `<|channel|>`. A
    header goes to the strict parser as a whole; when that refuses it, channel and recipient are read out of it as far
    as they can be, and when neither can, the message is an answer. One of another role is dropped up to the next
    `<|start|>`.
    """

    def __init__(self, encoding: HarmonyEncoding, role: Role | None) -> None:
        super().__init__(encoding, role=role)
        self._encoding = encoding
        self._start, self._channel, self._message = _tokens(encoding, "<|start|><|channel|><|message|>")
        self._turn_ends = frozenset(encoding.stop_tokens_for_assistant_actions())
        self._message_ends = frozenset(encoding.stop_tokens())
        self._phase = _Phase.BETWEEN if role is None else _Phase.HEADER
        self._header: list[int] = []  # tokens after <|start|>
        self._delta_is_fresh = False
        self._completed = False
        self._messages: list[Message] | None = None  # as last told; None when there may be another
        self.ignored_last_token = False  # it came between messages or after the turn: a repaired vLLM asks

    def process(self, token: int) -> TolerantParser:
        self._delta_is_fresh = self._completed = False
        begins = token in (self._start, self._channel)
        if token in self._message_ends or token == self._message:  # between them the strict parser begins and ends none
            self._messages = None
        self.ignored_last_token = self._phase is _Phase.OVER or (self._phase is _Phase.BETWEEN and not begins)
        if self._phase is _Phase.CONTENT:
            self._process_content(token)
        elif self._phase is _Phase.HEADER:
            self._process_header(token)
        elif self._phase is _Phase.BETWEEN and begins:
            self._phase = _Phase.HEADER
            if token == self._channel:
                self._header = [token]
        return self

    def process_eos(self) -> TolerantParser:
        """Nothing comes any more: a message that is cut off in its text ends there, one in its header was none."""
        self._delta_is_fresh, self._completed, self._messages = False, False, None
        if self._phase is _Phase.CONTENT:
            super().process_eos()
            self._completed = True
        self._phase = _Phase.OVER
        return self

    def _process_content(self, token: int) -> None:
        try:
            super().process(token)
        except HarmonyError as error:
            logger.debug("harmony: token %d dropped from a message: %s", token, error)
            return
        self._delta_is_fresh = True
        if token in self._message_ends:
            self._completed = True
            self._phase = _Phase.OVER if token in self._turn_ends else _Phase.BETWEEN

    def _process_header(self, token: int) -> None:
        if token in self._turn_ends:
            self._phase = _Phase.OVER
        elif token != self._message:
            self._header.append(token)
        elif self._read_header():
            self._phase = _Phase.CONTENT
            self._delta_is_fresh = True
        else:
            self._phase = _Phase.BETWEEN

    def _read_header(self) -> bool:
        """Feed the header to the strict parser, or what can be understood of it. False when nothing can."""
        header, self._header = self._header, []
        begun_twice = self._start in header
        if begun_twice:
            header = header[len(header) - header[::-1].index(self._start) :]
        try:
            text = self._encoding.decode(header)
        except (HarmonyError, ValueError):
            text = None
        # the strict parser takes a word that stands alone for a recipient: `final json`, which vLLM 0.33's grammar of a
        # structured answer allows, would be a call of `json`
        format_alone = text is not None and "to=" not in text and _FORMAT.search(text)
        if not begun_twice and not format_alone and self._read_strictly(header):
            return True
        return text is not None and self._read_header_text(text)

    def _read_strictly(self, header: list[int]) -> bool:
        named = header and not self._encoding.is_special_token(header[0])
        try:
            self._begin("" if named else "assistant")  # without a role the strict parser would make it a tool's
            for token in (*header, self._message):
                super().process(token)
        except HarmonyError:
            return False
        return True

    def _begin(self, role: str) -> None:
        """Give the strict parser the <|start|> that it waits for, unless it was made to expect the header of a role."""
        if super().state is StreamState.EXPECT_START:
            for token in (self._start, *_tokens(self._encoding, role)):
                super().process(token)

    def _read_header_text(self, text: str) -> bool:
        channels = r"(analysis|commentary|final)\b"
        channel = re.search(rf"<\|channel\|>\W*{channels}", text) or re.search(rf"\b{channels}", text)
        recipient = re.search(r"\bto=([\w.-]{1,256})", text)
        if re.match(r"\s*(user|system|developer|tool)\b", text):
            logger.debug("harmony: a message is dropped because it is not the assistant's: %r", text)
            return False
        logger.debug("harmony: a message's header is malformed, and read as far as possible: %r", text)
        spelled = f" to={recipient[1]}" if recipient else ""
        spelled += f"<|channel|>{channel[1] if channel else 'commentary' if recipient else 'final'}"
        spelled += " <|constrain|>json" if recipient and "json" in text else ""
        try:
            self._begin("assistant")
            for token in self._encoding.encode(spelled + "<|message|>", allowed_special="all"):
                super().process(token)
        except HarmonyError as error:
            logger.debug("harmony: the message is dropped after all: %s", error)
            return False
        return True

    def resume(self) -> None:
        """Read on after the end of a turn: the output of a tool that the server ran, and the turn after it."""
        if self._phase is _Phase.OVER:
            self._phase = _Phase.BETWEEN

    def pause(self) -> None:
        """An output came without a token: there is nothing new to tell."""
        self._delta_is_fresh = self._completed = False

    @property
    def in_header(self) -> bool:
        return self._phase is _Phase.HEADER

    @property
    def in_content(self) -> bool:
        return self._phase is _Phase.CONTENT

    @property
    def completed(self) -> bool:
        """Whether the last token ended a message, the last one of `messages`."""
        return self._completed

    @property
    def messages(self) -> list[Message]:
        """Those that have ended. vLLM 0.33 asks after every token, and the strict parser writes and reads JSON of them
        all for it."""
        if self._messages is None:
            self._messages = super().messages
        return list(self._messages)

    @property
    def last_content_delta(self) -> str | None:
        """Text that the last token completed; None when it completed none, also when it was dropped."""
        return super().last_content_delta if self._delta_is_fresh else None

    @property
    def state(self) -> StreamState:
        """EXPECT_START exactly once a message, with the token that ends it: vLLM sends the "done" events upon it."""
        if self._completed:
            return StreamState.EXPECT_START
        return StreamState.CONTENT if self._phase is _Phase.CONTENT else StreamState.HEADER
