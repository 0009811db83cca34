"""Reads one turn of the model, token by token, and emits its parts as soon as their text cannot change.

Every API, streamed and whole, reads a turn through this class, so that they agree: a stream sends the events as they
come, a whole answer reads the parts at the end. A part is reasoning, answer or call (`Kind`). `Reading` holds a
request's rules for its answer:

* choice "none": the model must call no tool. A call that it writes nevertheless becomes an answer.
* choice "required" or "function": if the engine constrains the *answer* to a grammar of calls, the answer is kept until
  its end and becomes calls. If it is not valid (cut off, or no JSON) it stays an answer.
* a call's arguments keep the model's spelling, except what JSON forbids and models write: line ends in strings, and
  backslashes before other letters (`\\d`). Clients fail on these.
* stop strings end the answer. They have no effect in reasoning, headers and arguments, where the same letters mean
  nothing to the client. Text that may be the beginning of a stop string waits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from npu_gptoss.harmony.conversation import custom_arguments
from npu_gptoss.harmony.parser import Kind, TolerantParser, function_of, kind_of, text_of


@dataclass(frozen=True)
class Reading:
    """A request's rules for reading its answer.

    function: the one that must be called, if choice is "function"; its answer is the arguments, or with raw_input the
    text that is its only argument. min_tokens: stop strings have no effect in the text of the first tokens up to this
    number. functions: the names that the request offers. with_reasoning, parallel: the client sees reasoning, and more
    than the first call.
    """

    choice: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None
    raw_input: bool = False
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    functions: frozenset[str] = frozenset()
    with_reasoning: bool = True
    parallel: bool = True

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "function")


@dataclass
class Part:
    """A message of the turn; `text` is the emitted part, in `pieces`. `complete`: None while the model writes it.

    shown: the client sees it.
    """

    number: int
    kind: Kind
    name: str | None = None  # the function of a call
    pieces: list[str] = field(default_factory=list)
    complete: bool | None = None
    shown: bool = True

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Event(NamedTuple):
    part: Part
    what: Literal["begun", "more", "ended"]
    text: str = ""


_SPACE = re.compile(r"\s*")


def _members(text: str, i: int) -> tuple[dict[str, str], int]:
    """Returns the members of the JSON object at text[i] with their values as written, and the index after it."""
    decode = json.JSONDecoder().raw_decode
    members = {}
    if text[i] != "{":
        raise ValueError("no object")
    i = _SPACE.match(text, i + 1).end()
    while text[i] != "}":
        key, i = decode(text, i)
        i = _SPACE.match(text, i).end()
        if text[i] != ":":
            raise ValueError("no member")
        first = _SPACE.match(text, i + 1).end()
        _, i = decode(text, first)
        members[key] = text[first:i]
        i = _SPACE.match(text, i).end()
        if text[i] == ",":
            i = _SPACE.match(text, i + 1).end()
    return members, i + 1


def forced_calls(reading: Reading, content: str) -> list[tuple[str, str]]:
    """Returns name and arguments of the calls that `structure.forced_schema` made the model write as its answer.

    Empty if the answer is no such JSON. The arguments are the model's own text.
    """
    if not reading.forced:
        return []
    if reading.raw_input and reading.function is not None:
        return [(reading.function, custom_arguments(content))]
    try:
        written = json.loads(content)
        if reading.function is not None:
            return [(reading.function, content.strip())] if isinstance(written, dict) else []
        calls, i = [], content.index("[") + 1
        for _ in written:
            members, i = _members(content, content.index("{", i))
            calls.append((json.loads(members["name"]), members["parameters"]))
        return calls if all(isinstance(name, str) for name, _ in calls) else []
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        return []


# In JSON: pairs with a backslash, characters that begin or end a string, and characters that a string must escape
_MARKS = re.compile(r'\\.|["\x00-\x1f]', re.DOTALL)
_ESCAPES = re.compile(r'\\["\\/bfnrtu]')


class _Arguments:
    """Escapes in the strings of a JSON object that comes in pieces what must be escaped. Other texts stay."""

    def __init__(self) -> None:
        self._is_json: bool | None = None  # None: not begun
        self._quoted = False
        self._held = ""  # a backslash whose next character has not come

    def more(self, text: str) -> str:
        """Returns the text that can be emitted now."""
        if self._is_json is None and (begun := text.lstrip()):
            self._is_json = begun.startswith("{")
        if not self._is_json:
            return text
        text = self.rest() + text
        if '"' not in text and "\\" not in text and text.isprintable():
            return text
        if (len(text) - len(text.rstrip("\\"))) % 2:
            text, self._held = text[:-1], "\\"
        return _MARKS.sub(self._mark, text)

    def _mark(self, found: re.Match[str]) -> str:
        self._quoted ^= found[0] == '"'
        if not self._quoted or found[0] == '"' or _ESCAPES.fullmatch(found[0]):
            return found[0]
        return json.dumps(found[0])[1:-1]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


class _StopStrings:
    """Cuts a text that comes in pieces at the first stop string, and holds back a possible beginning of it."""

    def __init__(self, reading: Reading) -> None:
        self._stop = reading.stop
        self._include = reading.include_stop
        self._held = ""
        self._longest = max(map(len, reading.stop), default=1) - 1

    def more(self, text: str, looked_for: bool) -> tuple[str, str | None]:
        """Returns the text that can be emitted now, and the stop string that ended it."""
        if not looked_for:
            sent, self._held = self._held + text, ""
            return sent, None
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stop if stop and stop in text]
        if found:
            first, stop = min(found, key=lambda place: place[0])
            self._held = ""
            return text[: first + len(stop) * self._include], stop
        sent = max(len(text) - self._longest, 0)
        while sent < len(text) and not any(stop.startswith(text[sent:]) for stop in self._stop):
            sent += 1
        self._held = text[sent:]
        return text[:sent], None

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)
class _Open:
    """The message that the model is writing."""

    kind: Kind
    name: str | None
    waits: bool = False  # for its end: it may be a forced call
    stops: _StopStrings | None = None
    escapes: _Arguments | None = None
    read: list[str] = field(default_factory=list)  # the complete text, if not each text is emitted at once
    part: Part | None = None  # set once a part of it is emitted

    @property
    def at_once(self) -> bool:
        return self.stops is None and self.escapes is None and not self.waits


@dataclass
class Turn:
    """Reads a turn: `feed` its tokens one by one, then `end` it; both return the new events.

    After a stop string (`stopped`) further tokens are dropped. `kind`: the part of the last token's text; None for a
    token of the format. `reasoning_tokens`: how many tokens were text of reasoning.
    """

    parser: TolerantParser
    reading: Reading = field(default_factory=Reading)
    parts: list[Part] = field(default_factory=list)
    stopped: str | None = None
    kind: Kind | None = None
    reasoning_tokens: int = 0
    _tokens: int = 0
    _open: _Open | None = None
    _direct: Part | None = None  # its part, if texts are emitted at once
    _over: bool = False

    def __post_init__(self) -> None:
        self.parser.functions = self.reading.functions

    def begin(self, header: Iterable[int]) -> None:
        """Reads the header of a message whose first text is in the prompt and which the model continues."""
        for token in header:
            self.parser.process(token)
        self._open = self._begun(self.parser.current_channel, self.parser.current_recipient)

    def feed(self, token: int) -> list[Event]:
        self.kind = None
        if self.stopped is not None or self._over:
            return []
        self._tokens += 1
        parser, part = self.parser.process(token), self._direct
        if part is not None and parser.settled:  # nearly all tokens
            self.kind = part.kind
            self.reasoning_tokens += part.kind is Kind.REASONING
            part.pieces.append(parser.last_content_delta)
            return [Event(part, "more", parser.last_content_delta)]
        events: list[Event] = []
        if self._open is None:
            if parser.in_content:
                self._open = self._begun(parser.current_channel, parser.current_recipient)
            elif parser.completed:  # within its header
                message = parser.messages[-1]
                self._open = self._begun(message.channel, message.recipient)
            if self._open is None:
                return events
            if self._open.kind is Kind.CALL:
                self._part_of(self._open, events)
        elif parser.in_content:
            self.kind = self._open.kind
            self.reasoning_tokens += self.kind is Kind.REASONING
        self._read(parser.last_content_delta or "", events)
        if parser.completed and self.stopped is None:
            self._close(text_of(parser.messages[-1]), True, events)
        return events

    def end(self, finish_reason: str | None) -> list[Event]:
        """Ends the generation. A part that its reason ("stop" or another) cut off is not complete."""
        over, self._over = self._over or self.stopped is not None, True
        events: list[Event] = []
        if over:
            return events
        if self._open is not None:
            self._close(self.parser.current_content or "", finish_reason == "stop", events)
        elif self.parser.in_header and self.parser.process_eos().completed:
            message = self.parser.messages[-1]
            self._open = self._begun(message.channel, message.recipient)
            if self._open is not None:
                self._close(text_of(message), finish_reason == "stop", events)
        return events

    def read(self, tokens: Iterable[int], finish_reason: str | None = None) -> Turn:
        """Reads a whole turn."""
        for token in tokens:
            self.feed(token)
        self.end(finish_reason)
        return self

    def texts(self, kind: Kind) -> str | None:
        """Returns the text of all shown parts of a kind, each on a separate line; None without a part."""
        parts = [part.text for part in self.parts if part.kind is kind and part.shown]
        return "\n".join(filter(None, parts)) if parts else None

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind is Kind.CALL]

    @property
    def called(self) -> bool:
        """True if the client must run calls: the turn has some, and all are complete."""
        calls = self.calls
        return bool(calls) and all(call.complete for call in calls)

    def _begun(self, channel: str | None, recipient: str | None) -> _Open | None:
        kind = kind_of("assistant", channel, recipient, self.reading.functions)
        if kind is None:
            return None
        name = function_of(recipient, self.reading.functions)
        if kind is Kind.CALL and self.reading.choice == "none":
            kind, name = Kind.ANSWER, None
        waits = self.reading.forced and kind is Kind.ANSWER and channel != Kind.CALL.value
        stops = _StopStrings(self.reading) if self.reading.stop and kind is Kind.ANSWER else None
        return _Open(kind, name, waits, stops, _Arguments() if kind is Kind.CALL else None)

    def _read(self, text: str, events: list[Event]) -> None:
        message = self._open
        if not text:
            return
        if message.at_once:
            self._emit(message, text, events)
            return
        message.read.append(text)
        if message.waits:
            return
        if message.escapes is not None:
            if sent := message.escapes.more(text):
                self._emit(message, sent, events)
            return
        sent, self.stopped = message.stops.more(text, self._tokens > self.reading.min_tokens)
        if sent:
            self._emit(message, sent, events)
        if self.stopped is not None:
            self._ended(message, True, events)

    def _close(self, text: str, complete: bool, events: list[Event]) -> None:
        """Sets the message's final text: an incomplete character becomes text only now."""
        message = self._open
        read = message.part.text if message.at_once and message.part else "".join(message.read)
        if text.startswith(read):
            self._read(text[len(read) :], events)
            if self.stopped is not None:
                return
            read = text
        is_call = message.waits and not self.calls and (complete or not self.reading.raw_input)
        calls = forced_calls(self.reading, read) if is_call else []
        for name, arguments in calls:
            call = _Open(Kind.CALL, name)
            self._emit(call, arguments, events)
            self._ended(call, True, events)
        if calls:
            return
        held = message.escapes or message.stops
        rest = read if message.waits else held.rest() if held else ""
        if message.kind is Kind.CALL and complete and not read.strip():
            rest = "{}"  # a function without parameters: clients read JSON
        if rest:
            self._emit(message, rest, events)
        elif message.kind is Kind.CALL or (complete and message.kind is Kind.ANSWER):
            self._part_of(message, events)  # the model answered with an empty text
        self._ended(message, complete, events)

    def _part_of(self, message: _Open, events: list[Event]) -> Part:
        if message.part is None:
            message.part = Part(len(self.parts), message.kind, message.name)
            if message.kind is Kind.REASONING:
                message.part.shown = self.reading.with_reasoning
            elif message.kind is Kind.CALL:
                message.part.shown = self.reading.parallel or not self.calls
            self.parts.append(message.part)
            events.append(Event(message.part, "begun"))
            self._direct = message.part if message.at_once else None
        return message.part

    def _emit(self, message: _Open, text: str, events: list[Event]) -> None:
        part = self._part_of(message, events)
        part.pieces.append(text)
        events.append(Event(part, "more", text))

    def _ended(self, message: _Open, complete: bool, events: list[Event]) -> None:
        if message.part is not None:
            message.part.complete = complete
            events.append(Event(message.part, "ended"))
        self._open = self._direct = None
