"""One turn of the model, token by token: which parts it has, and what of them may be told already.

Both APIs, streamed and whole, read a turn through this one machine, so that they cannot differ: a stream tells the
events as they come, a whole answer looks at the parts at the end.

A part is reasoning, answer or call (`reading.Kind`). What a request says about reading its answer is a `Reading`:

* `tool_choice` "none": the model calls no tool. What it writes as a call all the same is told as answer.
* `tool_choice` "required" or a function: a grammar makes the model write the call as its answer. That answer is held
  back to its end and told as calls; when it is none (cut off, or no JSON) it is told as written.
* stop strings end the answer, and are looked for there alone: not in reasoning, headers or arguments, where the same
  letters mean nothing to the client. Text that may be the beginning of one is held back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from npu_gptoss.harmony.parser import TOOL_PREFIX, Kind, TolerantParser, kind_of, text_of

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import ChatCompletionRequest, ResponsesRequest
    from vllm.sampling_params import SamplingParams


@dataclass(frozen=True)
class Reading:
    """What a request says about how its answer is read."""

    choice: Literal["auto", "none", "required", "function"] = "auto"
    function: str | None = None  # the one that must be called: choice is "function"
    stop: tuple[str, ...] = ()
    include_stop: bool = False  # whether the stop string stays in the answer
    min_tokens: int = 0  # no stop string is looked for in the text of so many first tokens

    @property
    def forced(self) -> bool:
        return self.choice in ("required", "function")


def choice_of(tool_choice: Any) -> tuple[str, str | None]:
    """`Reading.choice` and `Reading.function` of a request's `tool_choice`, as chat and /v1/responses spell it.

    Raises ValueError, which vLLM answers with 400, for a choice of tools that are not functions.
    """
    if tool_choice is None or tool_choice in ("auto", "none", "required"):
        return tool_choice or "auto", None
    kind = getattr(tool_choice, "type", None)
    if kind == "allowed_tools":  # /v1/responses; `allowed_tools` says which
        return tool_choice.mode, None
    if kind == "function":  # chat has the name in a field of its own
        return "function", getattr(tool_choice, "name", None) or tool_choice.function.name
    raise ValueError(
        f"tool_choice must be auto, none, required, a function or allowed_tools of functions; got {kind!r}"
    )


def reading_of(request: ChatCompletionRequest | ResponsesRequest) -> Reading:
    choice, function = choice_of(request.tool_choice)
    stop = getattr(request, "stop", None) or ()
    if not hasattr(request, "include_stop_str_in_output") or choice in ("required", "function"):
        return Reading(choice, function)  # 0.11.0's /v1/responses has no stop strings, and JSON must not be cut
    if choice == "none" and not request.tools:
        choice = "auto"  # chat's default: nothing was chosen
    return Reading(
        choice,
        function,
        (stop,) if isinstance(stop, str) else tuple(stop),
        request.include_stop_str_in_output,
        getattr(request, "min_tokens", None) or 0,
    )


def stops_of(parameters: SamplingParams) -> Reading:
    """The part of a reading that the engine needs in order to end the generation where the answer ends."""
    return Reading(
        stop=tuple(parameters.stop or ()),
        include_stop=parameters.include_stop_str_in_output,
        min_tokens=parameters.min_tokens,
    )


@dataclass
class Part:
    """One message of the turn; `text` is what has been told of it. `complete` once the model has ended it."""

    number: int
    kind: Kind
    name: str | None = None  # the function of a call
    text: str = ""
    complete: bool | None = None  # None: the model is still at it


@dataclass(frozen=True)
class Event:
    part: Part
    what: Literal["begun", "more", "ended"]
    text: str = ""


_SPACE = re.compile(r"\s*")


def _members(text: str, i: int) -> tuple[dict[str, str], int]:
    """The members of the JSON object at text[i], each value as it is written there, and the place after the object."""
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
    """Name and arguments of the calls that `tool_choice` made the model write as its answer; empty when it is none.

    vLLM's grammar asks for `[{"name": …, "parameters": …}, …]` when a call is required, and for the arguments alone
    when the function is named. The arguments are the model's own text.
    """
    if not reading.forced:
        return []
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


class _StopStrings:
    """Cuts a text that comes in pieces at the first stop string, and holds back what may be the beginning of one."""

    def __init__(self, reading: Reading) -> None:
        self._stop = reading.stop
        self._include = reading.include_stop
        self._held = ""
        self._longest = max(map(len, reading.stop), default=1) - 1

    def more(self, text: str, looked_for: bool) -> tuple[str, str | None]:
        """What may be told now, and the stop string that ended the text."""
        if not self._stop:
            return text, None
        if not looked_for:
            told, self._held = self._held + text, ""
            return told, None
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stop if stop and stop in text]
        if found:
            first, stop = min(found, key=lambda place: place[0])
            self._held = ""
            return text[: first + len(stop) * self._include], stop
        told = max(len(text) - self._longest, 0)
        while told < len(text) and not any(stop.startswith(text[told:]) for stop in self._stop):
            told += 1
        self._held = text[told:]
        return text[:told], None

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held


@dataclass
class _Open:
    """The message that the model is writing."""

    kind: Kind
    name: str | None
    waits: bool  # for its end: it may be a forced call
    stops: _StopStrings
    read: str = ""  # all of its text
    part: Part | None = None  # once something of it may be told


@dataclass
class Turn:
    """Reads a turn: `feed` its tokens one by one, then `end` it; both return what may be told.

    After a stop string (`stopped`) tokens mean nothing any more.
    """

    parser: TolerantParser
    reading: Reading = field(default_factory=Reading)
    parts: list[Part] = field(default_factory=list)
    stopped: str | None = None
    _tokens: int = 0
    _open: _Open | None = None
    _over: bool = False

    def feed(self, token: int) -> list[Event]:
        if self.stopped is not None or self._over:
            return []
        self._tokens += 1
        events: list[Event] = []
        self.parser.process(token)
        if self._open is None and self.parser.in_content:
            self._open = self._begun()
            if self._open is not None and self._open.kind is Kind.CALL:
                self._part_of(self._open, events)
        if self._open is None:
            return events
        self._read(self.parser.last_content_delta or "", events)
        if self.parser.completed and self.stopped is None:
            self._close(text_of(self.parser.messages[-1]), True, events)
        return events

    def end(self, finish_reason: str | None) -> list[Event]:
        """The generation is over. A part that its reason ("stop" or another) cut off is not complete."""
        events: list[Event] = []
        if self._open is not None and not self._over and self.stopped is None:
            self._close(self.parser.current_content or "", finish_reason == "stop", events)
        self._over = True
        return events

    def read(self, tokens: Iterable[int], finish_reason: str | None = None) -> Turn:
        """A whole turn at once."""
        for token in tokens:
            self.feed(token)
        self.end(finish_reason)
        return self

    def texts(self, kind: Kind) -> str | None:
        """The text of all parts of a kind, each on a line of its own; None without one."""
        parts = [part.text for part in self.parts if part.kind is kind]
        return "\n".join(filter(None, parts)) if parts else None

    @property
    def calls(self) -> list[Part]:
        return [part for part in self.parts if part.kind is Kind.CALL]

    @property
    def called(self) -> bool:
        """Whether the turn is one of calls that can be made: all of them have been written to their end."""
        return bool(self.calls) and all(call.complete for call in self.calls)

    def _begun(self) -> _Open | None:
        channel, recipient = self.parser.current_channel, self.parser.current_recipient
        kind = kind_of(self.parser.current_role, channel, recipient)
        if kind is None:
            return None
        name = recipient.removeprefix(TOOL_PREFIX) if kind is Kind.CALL else None
        if kind is Kind.CALL and self.reading.choice == "none":
            kind, name = Kind.ANSWER, None
        waits = self.reading.forced and kind is Kind.ANSWER and channel != Kind.CALL.value
        return _Open(kind, name, waits, _StopStrings(self.reading if kind is Kind.ANSWER else Reading()))

    def _read(self, text: str, events: list[Event]) -> None:
        message = self._open
        message.read += text
        if not text or message.waits:
            return
        told, self.stopped = message.stops.more(text, self._tokens > self.reading.min_tokens)
        if told:
            self._tell(message, told, events)
        if self.stopped is not None:
            self._ended(message, True, events)

    def _close(self, text: str, complete: bool, events: list[Event]) -> None:
        """The message has this text in the end: half a character comes only now."""
        message = self._open
        if text.startswith(message.read):
            self._read(text[len(message.read) :], events)
            if self.stopped is not None:
                return
        calls = forced_calls(self.reading, message.read) if message.waits and not self.calls else []
        for name, arguments in calls:
            call = _Open(Kind.CALL, name, False, message.stops)
            self._tell(call, arguments, events)
            self._ended(call, True, events)
        if calls:
            return
        rest = message.read if message.waits else message.stops.rest()
        if message.kind is Kind.CALL and complete and not message.read.strip():
            rest = "{}"  # a function without parameters: clients read JSON
        if rest:
            self._tell(message, rest, events)
        elif complete and message.kind is Kind.ANSWER:
            self._part_of(message, events)  # the model did answer, with nothing
        self._ended(message, complete, events)

    def _part_of(self, message: _Open, events: list[Event]) -> Part:
        if message.part is None:
            message.part = Part(len(self.parts), message.kind, message.name)
            self.parts.append(message.part)
            events.append(Event(message.part, "begun"))
        return message.part

    def _tell(self, message: _Open, text: str, events: list[Event]) -> None:
        part = self._part_of(message, events)
        part.text += text
        events.append(Event(part, "more", text))

    def _ended(self, message: _Open, complete: bool, events: list[Event]) -> None:
        if message.part is not None:
            message.part.complete = complete
            events.append(Event(message.part, "ended"))
        self._open = None


def assistant_turn(reading: Reading | None = None) -> Turn:
    """A turn of the served model."""
    from npu_gptoss.serving.lines.vllm import assistant_parser

    return Turn(assistant_parser(), reading or Reading())
