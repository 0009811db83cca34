"""One sample of an answer: the turn that its tokens make, and its finish reason."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.turn import Event, Turn
from npu_gptoss.harmony.parser import Kind


@dataclass
class Sample:
    """finish: "stop", "length" or another reason of the engine, None while it goes on; called: it ends in calls.

    tokens: how many were generated. answer: the tokens of the last piece that are text of the answer.
    """

    turn: Turn
    tokens: int = 0
    finish: str | None = None
    stop_reason: int | str | None = None
    answer: list[int] = field(default_factory=list)

    def read(self, piece: Piece) -> list[Event]:
        """Returns the events of new tokens. Drops tokens that the engine writes after a stop string."""
        turn = self.turn
        events: list[Event] = []
        self.answer = []
        for number, token in enumerate(piece.token_ids):
            self.tokens += 1
            events += turn.feed(token)
            if turn.kind is Kind.ANSWER:
                self.answer.append(number)
            if turn.stopped is not None:
                self.finish, self.stop_reason = "stop", turn.stopped
                return events
        if piece.finish is not None:
            events += turn.end(piece.finish)
            self.finish = piece.finish
            self.stop_reason = turn.stopped if turn.stopped is not None else piece.stop_reason
        return events

    @property
    def called(self) -> bool:
        return self.turn.called


async def steps_until_done(steps: AsyncIterator[Step], samples: Sequence[Sample]) -> AsyncGenerator[Step, None]:
    """Yields steps until every sample has ended. If a stop string ended a sample, closing the engine's generator ends
    its request, too; else the generator ends normally: an engine takes an early close for a client that has left."""
    async with aclosing(steps):
        async for step in steps:
            yield step
            ended = samples[-1].finish is not None and all(sample.finish for sample in samples)
            if ended and any(sample.turn.stopped is not None for sample in samples):
                return


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
