"""From the model's tokens to answers: a harmony parser that does not give up, and one rule for what a message is.

The format is the harmony guide's: messages `<|start|>{role}{header}<|message|>{content}` that end with `<|end|>`,
`<|call|>` (a tool call: the turn is over) or `<|return|>` (an answer: the turn is over). openai-harmony's parser raises
HarmonyError at the first token that does not fit, which vLLM 0.11.0 turns into an error response or a broken stream. It
happens in every load test, because `ignore_eos` makes the model go on past `<|return|>`, and now and then in headers
that the model spells badly.
"""

from __future__ import annotations

import enum
import logging
import re
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace

from openai_harmony import HarmonyEncoding, HarmonyError, Message, Role, StreamableParser, StreamState

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, replace

logger = logging.getLogger("vllm.npu_gptoss")

TOOL_PREFIX = "functions."


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
    BETWEEN = enum.auto()  # after a message: only <|start|> means anything
    HEADER = enum.auto()
    CONTENT = enum.auto()
    OVER = enum.auto()  # the turn has ended: nothing means anything


class TolerantParser(StreamableParser):
    """openai-harmony's parser that never raises and never loses text that it has read.

    Tokens between messages and after the end of the turn are dropped. A header goes to the strict parser as a whole;
    when that refuses it, channel and recipient are read out of it as far as they can be, and when neither can, the
    message is dropped up to the next `<|start|>`.
    """

    def __init__(self, encoding: HarmonyEncoding, role: Role | None) -> None:
        super().__init__(encoding, role=role)
        self._encoding = encoding
        self._start, self._message = encoding.encode("<|start|><|message|>", allowed_special="all")
        self._turn_ends = frozenset(encoding.stop_tokens_for_assistant_actions())
        self._message_ends = frozenset(encoding.stop_tokens())
        self._phase = _Phase.BETWEEN if role is None else _Phase.HEADER
        self._header: list[int] = []  # tokens after <|start|>
        self._delta_is_fresh = False
        self._completed = False
        self.ignored_last_token = False  # it came between messages or after the turn: a repaired vLLM asks

    def process(self, token: int) -> TolerantParser:
        self._delta_is_fresh = self._completed = False
        self.ignored_last_token = self._phase is _Phase.OVER or (self._phase is _Phase.BETWEEN and token != self._start)
        if self._phase is _Phase.CONTENT:
            self._process_content(token)
        elif self._phase is _Phase.HEADER:
            self._process_header(token)
        elif self._phase is _Phase.BETWEEN and token == self._start:
            self._phase = _Phase.HEADER
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
        if self._start not in header:  # else the model has begun the message twice
            try:
                self._begin()
                for token in (*header, self._message):
                    super().process(token)
            except HarmonyError:
                pass
            else:
                return True
        else:
            header = header[len(header) - header[::-1].index(self._start) :]
        try:
            text = self._encoding.decode(header)
        except (HarmonyError, ValueError):
            return False
        return self._read_header_text(text)

    def _begin(self, role: str = "") -> None:
        """Give the strict parser the <|start|> that it waits for, unless it was made to expect the header of a role."""
        if super().state is StreamState.EXPECT_START:
            for token in (self._start, *self._encoding.encode(role)):
                super().process(token)

    def _read_header_text(self, text: str) -> bool:
        channel = re.search(r"<\|channel\|>\W*(analysis|commentary|final)\b", text)
        recipient = re.search(r"\bto=([\w.-]{1,256})", text)
        if re.match(r"\s*(user|system|developer|tool)\b", text) or not (channel or recipient):
            logger.debug("harmony: a message is dropped because its header cannot be read: %r", text)
            return False
        logger.debug("harmony: a message's header is malformed, and read as far as possible: %r", text)
        spelled = f" to={recipient[1]}" if recipient else ""
        spelled += f"<|channel|>{channel[1] if channel else 'commentary'}"
        spelled += " <|constrain|>json" if "json" in text else ""
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
    def in_content(self) -> bool:
        return self._phase is _Phase.CONTENT

    @property
    def completed(self) -> bool:
        """Whether the last token ended a message, the last one of `messages`."""
        return self._completed

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


def install_parser(harmony_utils: ModuleType) -> None:
    """In the place of the strict parser, and of one that only ignores what follows the turn: both fail at headers."""
    original = harmony_utils.get_streamable_parser_for_assistant
    repaired = getattr(harmony_utils, "AssistantTurnParser", None)
    if repaired is None:
        expect_source(original, "StreamableParser(get_encoding(), role=Role.ASSISTANT)")
    else:
        expect_source(original, "return AssistantTurnParser()")
        expect_source(repaired.process, "self.ignored_last_token = self._turn_ended", "super().process(token)")

    def get_streamable_parser_for_assistant() -> TolerantParser:
        return TolerantParser(harmony_utils.get_encoding(), role=Role.ASSISTANT)

    replace(
        harmony_utils,
        "get_streamable_parser_for_assistant",
        get_streamable_parser_for_assistant,
        copies=("vllm.entrypoints.context", "vllm.entrypoints.openai.serving_chat"),
    )


def install_channels(harmony_utils: ModuleType) -> None:
    """Tell reasoning from answer by the channel; 0.11.0 counts messages, so that a lone answer becomes reasoning."""
    from npu_gptoss.serving.compat.turn import assistant_turn

    original_item = harmony_utils.parse_output_message
    original_rest = harmony_utils.parse_remaining_state
    expect_source(harmony_utils.parse_chat_output, "len(output_msgs) == 1", "output_msgs[:-1]")
    expect_source(original_item, 'raise ValueError(f"Unknown recipient: {recipient}")')
    expect_parameters(original_rest, "parser")

    def parse_chat_output(token_ids: Sequence[int]) -> tuple[str | None, str | None, bool]:
        """Reasoning and answer, each None when the model wrote none, of a turn that may be cut off anywhere."""
        turn = assistant_turn().read(token_ids)
        reasoning, answer = turn.texts(Kind.REASONING), turn.texts(Kind.ANSWER)
        return reasoning, answer, False

    def parse_output_message(message: Message) -> list:
        """An output item of /v1/responses; a message that 0.11.0 would raise for is told under its kind's channel."""
        kind = kind_of_message(message)
        built_in = message.recipient is not None and message.recipient.startswith(("browser.", "python", "container"))
        if kind is None or built_in:
            return original_item(message)
        shown = message.model_copy(update={"channel": kind.value})
        return original_item(shown if kind is Kind.CALL else shown.model_copy(update={"recipient": None}))

    def parse_remaining_state(parser: StreamableParser) -> list:
        if kind_of(parser.current_role, parser.current_channel, parser.current_recipient) is not Kind.ANSWER:
            return original_rest(parser)
        return original_rest(
            SimpleNamespace(
                current_content=parser.current_content,
                current_role=parser.current_role,
                current_recipient=None,
                current_channel=Kind.ANSWER.value,
            )
        )

    chat, responses = "vllm.entrypoints.openai.serving_chat", "vllm.entrypoints.openai.serving_responses"
    replacements: tuple[tuple[Callable, tuple[str, ...]], ...] = (
        (parse_chat_output, (chat, "vllm.reasoning.gptoss_reasoning_parser")),
        (parse_output_message, (responses,)),
        (parse_remaining_state, (responses,)),
    )
    for function, copies in replacements:
        replace(harmony_utils, function.__name__, function, copies=copies)
