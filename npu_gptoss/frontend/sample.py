"""The samples of an answer: the turns that their tokens make, and the way from an engine's steps to the client."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.turn import Event, Turn
from npu_gptoss.harmony.parser import Kind

Json = dict[str, Any]


@dataclass
class Sample:
    """finish: "stop", "length" or another reason of the engine, None while it goes on.

    tokens: how many were generated. answer: the tokens of the last piece that are text of the answer.
    """

    turn: Turn
    tokens: int = 0
    finish: str | None = None
    stop_reason: int | str | None = None
    answer: list[int] = field(default_factory=list)

    def read(self, piece: Piece) -> list[Event]:
        """Returns the events of new tokens that the client sees. Drops tokens that the engine writes after a stop
        string."""
        events, reading = self._read(piece), self.turn.reading
        if reading.with_reasoning and reading.parallel:
            return events
        return [event for event in events if event.part.shown]

    def _read(self, piece: Piece) -> list[Event]:
        turn = self.turn
        events: list[Event] = []
        self.answer = []
        for number, token in enumerate(piece.token_ids):
            self.tokens += 1
            events += turn.feed(token)
            if turn.kind is Kind.ANSWER:
                self.answer.append(number)
            if turn.stopped is not None:
                break
        if piece.finish is not None:
            events += turn.end(piece.finish)
            self.finish, self.stop_reason = piece.finish, piece.stop_reason
        if turn.stopped is not None:
            self.finish, self.stop_reason = "stop", turn.stopped
        return events

    @property
    def text(self) -> str:
        """Returns the answer, or the calls without one, for a log."""
        return self.turn.texts(Kind.ANSWER) or "".join(call.text for call in self.turn.calls)


@dataclass(frozen=True)
class Facts:
    """The server's facts for an answer.

    prompt_tokens: how many. cached_details: usage reports the tokens found in the prefix cache. log: called with the
    text, tokens and finish reason of each step of a stream, and at the end of each sample without tokens.
    """

    id: str
    model: str
    prompt_tokens: int
    cached_details: bool = False
    log: Callable[[str, Sequence[int] | None, str | None], None] | None = None


def _unchanged(step: Step) -> Step:
    return step


class Answer:
    """An answer of any API, `whole` or as a `stream`, from the outputs of an engine.

    A subclass has `take(step)` and `ended()` for the whole answer; `begun()`, `events(step)` and `end()` return lists
    of what a stream sends. step_of: turns an output into a Step; a generator in between would cost microseconds a
    token. last: returns the end of the stream, which follows `end()` or the error that cut the answer off; without it
    the error passes through.
    """

    def __init__(self, samples: Sequence[Sample], facts: Facts) -> None:
        self.samples, self.facts = samples, facts
        self.cached_tokens: int | None = None
        self.extra: Json = {}  # fields from the engine

    async def whole(self, outputs: AsyncGenerator[Any, None], step_of: Callable[[Any], Step] = _unchanged) -> Json:
        """Returns the whole answer."""
        async with aclosing(outputs):
            async for output in outputs:
                self.take(self._noted(step_of(output)))
                if self._is_cut():
                    break
        found = self.ended()
        self._log()
        return found

    async def stream(
        self,
        outputs: AsyncGenerator[Any, None],
        step_of: Callable[[Any], Step] = _unchanged,
        last: Callable[[Exception | None], Iterable[Any]] | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Yields the events of a stream in the form of the API. Closing the generator closes the engine's."""
        try:
            for event in self.begun():
                yield event
            async with aclosing(outputs):
                async for output in outputs:
                    for event in self.events(self._noted(step_of(output))):
                        yield event
                    if self._is_cut():
                        break
            self._log()
            for event in self.end():
                yield event
            error = None
        except Exception as raised:
            if last is None:
                raise
            error = raised
        for event in last(error) if last else ():
            yield event

    @property
    def counts(self) -> Json:
        """Returns token counts with OpenAI's names."""
        prompt, made = self.facts.prompt_tokens, sum(sample.tokens for sample in self.samples)
        return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}

    def _log(self) -> None:
        for sample in self.samples if self.facts.log is not None else ():
            self.facts.log(sample.text, None, "tool_calls" if sample.turn.called else sample.finish)

    def begun(self) -> list[Any]:
        return []

    def _is_cut(self) -> bool:
        """True if every sample has ended, one of them by a stop string: then closing the engine's generator ends the
        request. Else the generator ends normally: an engine takes an early close for a client that has left."""
        if self.samples[-1].finish is None:
            return False
        return all(one.finish for one in self.samples) and any(one.turn.stopped is not None for one in self.samples)

    def _noted(self, step: Step) -> Step:
        if self.cached_tokens is None:
            self.cached_tokens = step.cached_tokens
        if step.extra:
            self.extra |= step.extra
        return step


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
