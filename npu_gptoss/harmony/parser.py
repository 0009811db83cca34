"""Reads the model's tokens as harmony messages: a parser that never fails, and the rule for the kind of a message.

The format is the harmony guide's: messages `<|start|>{role}{header}<|message|>{content}` that end with `<|end|>`,
`<|call|>` (a tool call: the turn is over) or `<|return|>` (an answer: the turn is over). openai-harmony's parser raises
HarmonyError at the first token that does not fit. Every load test sends such tokens, because `ignore_eos` makes the
model go on past `<|return|>`, and the model itself writes a malformed header now and then.
"""

from __future__ import annotations

import enum
import functools
import logging
import re
from collections.abc import Callable, Container, Sequence

from openai_harmony import HarmonyEncoding, HarmonyError, Message, Role, StreamableParser, StreamState

from npu_gptoss.harmony.vocabulary import FIRST_SPECIAL_ID

logger = logging.getLogger(__name__)

TOOL_PREFIX = "functions."
_NAME = r"[\w.-]{1,256}"
_RECIPIENT = r"[^\s<]{1,256}"  # a tool's name may have other letters
# Headers that openai-harmony's strict parser reads as the guide means them. It takes a format that stands alone behind
# the channel (`final json`) for a recipient, so a format needs a recipient before it.
_WELL_FORMED = re.compile(
    rf"(assistant)?( to={_NAME})?(<\|channel\|>(analysis|commentary|final)( to={_NAME})?)?"
    r"(?P<format> (<\|constrain\|>)?json)?"
)
_CHANNELS = r"(analysis|commentary|final)(?![a-z])"  # models do write "final__" and "analysis–"
# The parts of a header at the beginning of a text. What follows them is content whose `<|message|>` is missing.
_PARTS = re.compile(
    rf"\s*(assistant\b)?\s*(to=(?P<before>{_NAME}))?\s*(<\|channel\|>)?\s*((?P<channel>{_CHANNELS}))?"
    rf"\s*(to=(?P<behind>{_NAME}))?\s*(<\|channel\|>\s*[a-z]+\b)?\s*(<\|constrain\|>)?\s*(?P<json>json\b)?\s*"
)
# What is left of a header that was cut off within one of its parts
_CUT = re.compile(r"to=?|<\|constrain\|>\s*\w*|code")
_OTHER_ROLE = re.compile(r"\s*((user|system|developer|tool)\b|(?!assistant\b)[^\s<]+ to=assistant\b)")
# What else a header may hold besides the name of a function
_WORDS = re.compile(r"<\|\w+\|>|\b(assistant|analysis|commentary|final|json|code)\b")
_GLUED = re.compile(r"\W*(commentary|analysis)$")  # to a name


class Kind(enum.Enum):
    """The kind of an assistant's message for the client."""

    REASONING = "analysis"
    ANSWER = "final"
    CALL = "commentary"


def kind_of(
    role: Role | str | None, channel: str | None, recipient: str | None, functions: Container[str] = ()
) -> Kind | None:
    """The kind of a message by its header; None for a message that is not the assistant's.

    A recipient `functions.NAME` makes a call on any channel, and so does NAME of `functions`, the tools that the
    request offers. `commentary` without a recipient is a preamble, which the harmony guide means for the user, as is
    text without a channel. A message to another recipient (a built-in tool that is not offered) is reasoning.
    """
    if role is None or Role(role) is not Role.ASSISTANT:
        return None
    if function_of(recipient, functions) is not None:
        return Kind.CALL
    if channel == "final":
        return Kind.ANSWER
    if recipient is not None or (channel or "").startswith("analysis"):  # models do write "analysis–"
        return Kind.REASONING
    return Kind.ANSWER


def function_of(recipient: str | None, functions: Container[str] = ()) -> str | None:
    """The function that a recipient names, without its prefix; None when it names none.

    A name that the request offers may have any letters. From others the model's additions are cut off, and a namespace
    that it invents (`tools.NAME`, `functions.functions.NAME`) before a name that is offered, or a channel behind it.
    """
    if recipient is None:
        return None
    name = recipient.removeprefix(TOOL_PREFIX)
    if name in functions:
        return name
    name = (re.match(_NAME, name) or [""])[0]
    for known in (name, name.rpartition(".")[2], _GLUED.sub("", name)):
        if known in functions:
            return known
    return name or None if recipient.startswith(TOOL_PREFIX) else None


def text_of(message: Message) -> str:
    return "".join(getattr(part, "text", "") for part in message.content)


def _is_cut(header: str, end: int) -> bool:
    """True when a header after `end` holds only the beginning of its next part."""
    rest = header[end:].strip()
    begun = header[:end].rstrip()
    if begun.endswith("<|channel|>") and any(kind.value.startswith(rest) for kind in Kind):
        return True
    return bool(_CUT.fullmatch(rest)) and (bool(begun) or rest.startswith("to"))


class _Phase(enum.Enum):
    BETWEEN = enum.auto()  # after a message
    HEADER = enum.auto()
    CONTENT = enum.auto()
    SKIPPED = enum.auto()  # in the content of a message that is not the assistant's
    OVER = enum.auto()  # the turn has ended: further tokens are dropped


@functools.cache
def _tokens(encoding: HarmonyEncoding, text: str) -> tuple[int, ...]:
    """Token ids of the few texts of the format itself: encoding one takes a millisecond."""
    return tuple(encoding.encode(text, allowed_special="all"))


@functools.cache
def _texts(encoding: HarmonyEncoding) -> dict[int, str]:
    """The text of each token seen so far that is whole characters."""
    return {}


_WAITING = 64  # tokens


class TolerantParser(StreamableParser):
    """openai-harmony's parser, but it never raises and loses no text of the assistant before the end of its turn.

    A header goes to the strict parser when it is well formed. Otherwise channel and recipient are read out of it as far
    as possible; without either the message is an answer. A message may lack its `<|start|>` and its `<|end|>`: control
    tokens are no text. One that ends within its header is text of the channel that the header names; unless that is
    `final` or the turn ends there, it is reasoning, because models begin turns with such noise. A message of another
    role is dropped.

    functions: the names that the request offers; one that stands alone in a header is the recipient.

    spelled: tokens of the published vocabulary with the text of a special or added token (`Encoder.spelled`).

    A token of text whose characters are known waits, and the strict parser reads many at once: on a host that does
    something else between two tokens it would take ten microseconds for each.

    last_content_delta: the text that the last token completed; None when it completed none, also when it was dropped.
    completed: the last token ended a message, the last of `messages`. settled: it was whole characters of a text.
    """

    last_content_delta: str | None = None
    completed = False
    settled = False
    functions: Container[str] = ()

    def __init__(self, encoding: HarmonyEncoding, spelled: Callable[[int], Sequence[int]] | None = None) -> None:
        super().__init__(encoding, role=Role.ASSISTANT)
        self._encoding = encoding
        self._spelled = spelled
        self._start, self._message, self._end = _tokens(encoding, "<|start|><|message|><|end|>")
        (self._channel,) = _tokens(encoding, "<|channel|>")
        (self._end_of_text,) = _tokens(encoding, "<|endoftext|>")  # a stop token, too, by generation_config.json
        self._turn_ends = frozenset(encoding.stop_tokens_for_assistant_actions())
        self._message_ends = frozenset(encoding.stop_tokens())
        self._phase = _Phase.HEADER
        self._header: list[int] = []  # tokens after <|start|>
        self._texts = _texts(encoding)
        self._waiting: list[int] = []  # tokens that the strict parser has not read

    def process(self, token: int) -> TolerantParser:
        if self.settled and (text := self._texts.get(token)) is not None:
            self.last_content_delta = text
            self._waiting.append(token)
            if len(self._waiting) == _WAITING:
                self._catch_up()
            return self
        if token >= FIRST_SPECIAL_ID and self._spelled is not None and (spelled := self._spelled(token)) != (token,):
            self.last_content_delta, self.completed, self.settled = None, False, False
            texts = [self.process(part).last_content_delta for part in spelled]
            self.last_content_delta = "".join(text for text in texts if text)
            return self
        if token == self._end_of_text:  # behind the `<|end|>` of an answer that a grammar of vLLM 0.33 ends so
            return self.process_eos()
        self.last_content_delta, self.completed = None, False
        if self._phase is _Phase.CONTENT:
            self._process_content(token)
        elif self._phase is not _Phase.OVER:
            self._process_outside(token)
        return self

    def process_eos(self) -> TolerantParser:
        """Ends the turn after its last token: a message that is cut off in its text ends there."""
        self.last_content_delta, self.completed = None, False
        self._catch_up()
        self.settled = False
        if self._phase is _Phase.CONTENT:
            super().process_eos()
            self.completed = True
        elif self._phase is _Phase.HEADER:
            self._end_in_header(over=True)
        self._phase = _Phase.OVER
        return self

    def _process_content(self, token: int) -> None:
        self._catch_up()
        self.settled = False
        if token in (self._start, self._channel):  # the message's end is missing
            self._process_content(self._end)
            self._process_outside(token)
            return
        if token == self._message:
            return
        try:
            super().process(token)
        except HarmonyError as error:
            logger.debug("harmony: token %d dropped from a message: %s", token, error)
            return
        text = self.last_content_delta = self._inner.last_content_delta
        if token in self._message_ends:
            self.completed = True
            self._phase = _Phase.OVER if token in self._turn_ends else _Phase.BETWEEN
        elif token < FIRST_SPECIAL_ID and text == self._encoding.decode([token]) and "\ufffd" not in text:
            self.settled = True
            self._texts[token] = text

    def _catch_up(self) -> None:
        """Gives the strict parser the tokens that wait."""
        waiting, self._waiting = self._waiting, []
        for token in waiting:
            super().process(token)

    def _process_outside(self, token: int) -> None:
        if token in self._message_ends or token == self._start:
            if self._phase is _Phase.HEADER:
                self._end_in_header(over=token in self._turn_ends)
            ended = _Phase.OVER if token in self._turn_ends else _Phase.BETWEEN
            self._phase = _Phase.HEADER if token == self._start else ended
        elif self._phase is _Phase.SKIPPED:
            pass
        elif token != self._message:
            self._header.append(token)
            self._phase = _Phase.HEADER
        elif self._read_header():
            self._phase = _Phase.CONTENT
            self.last_content_delta = self._inner.last_content_delta
        else:
            self._phase = _Phase.SKIPPED

    def _take_header(self) -> tuple[list[int], str]:
        header, self._header = self._header, []
        try:
            return header, self._encoding.decode(header)
        except (HarmonyError, ValueError):
            return header, ""

    def _read_header(self) -> bool:
        """Feed the readable part of the header to the strict parser. False: not the assistant's."""
        header, text = self._take_header()
        found = _WELL_FORMED.fullmatch(text)
        if found and ("to=" in text or not found["format"]) and self._read_strictly(header):
            return True
        if _OTHER_ROLE.match(text):
            logger.debug("harmony: a message is dropped because it is not the assistant's: %r", text)
            return False
        logger.debug("harmony: a message's header is malformed, and read as far as possible: %r", text)
        channels = re.findall(rf"<\|channel\|>\W*{_CHANNELS}", text) or re.findall(rf"\b{_CHANNELS}", text)[:1]
        recipient = re.search(rf"\bto=\s*({_RECIPIENT})", text) or re.search(rf"\b(functions\.{_RECIPIENT})", text)
        channel, words = channels[-1] if channels else None, _WORDS.sub(" ", text).split()
        if not recipient and len(words) == 1 and words[0] in self.functions and channel in (None, "commentary"):
            return self._begin_message(channel, words[0], "json" in text)
        return self._begin_message(channel, recipient and recipient[1], "json" in text)

    def _end_in_header(self, over: bool) -> None:
        """Reads a message that ends before its `<|message|>`: text outside of the header is its content."""
        _, text = self._take_header()
        parts = _PARTS.match(text)
        content = text[parts.end() :]
        if not content.strip() or _is_cut(text, parts.end()) or _OTHER_ROLE.match(text):
            return
        logger.debug("harmony: a message has no <|message|>: %r", text)
        channel, recipient = parts["channel"], parts["before"] or parts["behind"]
        if not (over or recipient or channel == "final"):
            channel = "analysis"
        if not self._begin_message(channel, recipient, bool(parts["json"])):
            return
        for token in (*self._encoding.encode(content, disallowed_special=()), self._end):
            super().process(token)
        self.completed = True

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

    def _begin_message(self, channel: str | None, recipient: str | None, as_json: bool) -> bool:
        """Begin a message of the assistant with a well-formed header."""
        spelled = f" to={recipient}" if recipient else ""
        spelled += f"<|channel|>{channel or ('commentary' if recipient else 'final')}"
        spelled += " <|constrain|>json" if recipient and as_json else ""
        try:
            self._begin("assistant")
            for token in self._encoding.encode(spelled + "<|message|>", allowed_special="all"):
                super().process(token)
        except HarmonyError as error:
            logger.debug("harmony: the message is dropped after all: %s", error)
            return False
        return True

    @property
    def in_header(self) -> bool:
        return self._phase is _Phase.HEADER

    @property
    def over(self) -> bool:
        """True behind the end of the turn."""
        return self._phase is _Phase.OVER

    @property
    def in_content(self) -> bool:
        return self._phase is _Phase.CONTENT

    @property
    def current_content(self) -> str:
        self._catch_up()
        return super().current_content
