"""The front end over a script: an engine that yields the tokens of a text, in pieces of any size."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

pytest.importorskip("openai_harmony")

from npu_gptoss.frontend import chat
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.sample import Answer
from tests.harmony.conftest import directory, encoder, library  # noqa: F401

TURN_ENDS = (200002, 200012)  # <|return|>, <|call|>
MESSAGES = [{"role": "user", "content": "hi"}]


class Script:
    """An engine for one request. given: number of tokens taken; ended: all were taken; closed: the client left."""

    def __init__(self, tokens: Sequence[int], bite: int, finish: str | None = None) -> None:
        self.tokens, self.bite, self.finish = list(tokens), bite, finish
        self.given, self.ended, self.closed = 0, False, False

    async def steps(self) -> AsyncIterator[Step]:
        try:
            for first in range(0, len(self.tokens), self.bite):
                part = self.tokens[first : first + self.bite]
                self.given += len(part)
                last = first + self.bite >= len(self.tokens)
                reason = self.finish or ("stop" if part[-1] in TURN_ENDS else "length")
                yield Step([Piece(0, part, reason if last else None)], cached_tokens=0)
                await asyncio.sleep(0)
            self.ended = True
        finally:
            self.closed = True


def run(answer: Answer, script: Script, *, whole: bool) -> Any:
    """Returns a whole answer, or the list of what its stream sends."""

    async def go() -> Any:
        if whole:
            return await answer.whole(script.steps())
        return [event async for event in answer.stream(script.steps())]

    got = asyncio.run(go())
    assert script.closed
    return got


@pytest.fixture
def tokens(library) -> Callable[[str], list[int]]:  # noqa: F811
    return lambda text: library.encode(text, allowed_special="all")


@pytest.fixture
def ask(library, encoder, tokens) -> Callable[..., Any]:  # noqa: F811
    """Returns a chat's answer to a turn of the model; bite: None for a whole answer, else the size of a step."""

    def asked(text: str, bite: int | None = None, finish: str | None = None, **fields: Any) -> Any:
        body = {"messages": MESSAGES, "stream": bite is not None} | fields
        request = chat.read(body)
        script = Script(tokens(text), bite or 3, finish)
        facts = chat.Facts("chatcmpl-1", "gpt-oss", len(request.asked.prompt(encoder)))
        answer = chat.Answer(request, facts, lambda: request.asked.turn(encoder))
        got = run(answer, script, whole=bite is None)
        assert script.ended or "stop" in fields, "the request counts as one whose client has left"
        return got

    return asked
