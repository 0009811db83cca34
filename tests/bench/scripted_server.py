"""An OpenAI-compatible server over real sockets whose delays are exact: it owns the clock that the client reads.

A script is what one request gets: `Wait(seconds)` moves the clock, `Event(…)` sends one server-sent event and waits
until the client has looked at the clock for it, so that no two events are seen at one time and none is seen late.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


class Clock:
    """Stands still until it is moved; counts how often it was read."""

    def __init__(self) -> None:
        self.now, self.reads = 100.0, 0

    def __call__(self) -> float:
        self.reads += 1
        return self.now


@dataclass(frozen=True)
class Wait:
    seconds: float


@dataclass(frozen=True)
class Event:
    """Sent as JSON; a text is sent as it is. seen: whether the client reads the clock for it."""

    content: Mapping[str, Any] | str
    seen: bool = True


@dataclass(frozen=True)
class Status:
    """Instead of a stream."""

    code: int
    content: Mapping[str, Any] | str


class Hangup:
    """The connection is gone, without an end of the stream."""


class Silence:
    """Nothing more comes, and the connection stays."""


class Later:
    """What follows is sent a moment later in real time, in a packet of its own."""


Step = Wait | Event | Status | type[Hangup] | type[Silence] | type[Later]


@dataclass
class Server:
    """Requests get the scripts in turn, the last one again and again.

    bodies: what was asked for. connections: the clients' addresses.
    """

    scripts: Sequence[Sequence[Step]]
    models: Sequence[str] | None = ("gpt-oss",)
    clock: Clock = field(default_factory=Clock)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set[Any] = field(default_factory=set)
    under_way: int = 0
    most_under_way: int = 0
    url: str = ""

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append({"path": request.path, **await request.json()})
        self.connections.add(request.transport.get_extra_info("peername"))
        script = self.scripts[min(len(self.bodies), len(self.scripts)) - 1]
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            return await self._play(request, script)
        finally:
            self.under_way -= 1

    async def _play(self, request: web.Request, script: Sequence[Step]) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        for step in script:
            if isinstance(step, Status):
                text = step.content if isinstance(step.content, str) else json.dumps(step.content)
                return web.Response(status=step.code, text=text)
            if isinstance(step, Wait):
                self.clock.now += step.seconds
                await asyncio.sleep(0)  # others may have their turn
                continue
            if response is None:
                response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await response.prepare(request)
            if step is Later:
                await asyncio.sleep(0.02)
                continue
            if step is Hangup:
                request.transport.abort()
                return response
            if step is Silence:
                while request.transport is not None and not request.transport.is_closing():
                    await asyncio.sleep(0.01)
                return response
            reads = self.clock.reads
            text = step.content if isinstance(step.content, str) else f"data: {json.dumps(step.content)}\n\n"
            await response.write(text.encode())
            while step.seen and self.clock.reads == reads:
                await asyncio.sleep(0)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        if self.models is None:
            return web.Response(status=404, text="Not Found")
        return web.json_response({"object": "list", "data": [{"id": name} for name in self.models]})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.11.0"})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Server]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/version", self._version)
        app.router.add_post("/v1/completions", self._answer)
        app.router.add_post("/v1/chat/completions", self._answer)
        runner = web.AppRunner(app, shutdown_timeout=0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()


DONE = Event("data: [DONE]\n\n", seen=False)


def text(piece: str, finish: str | None = None) -> Event:
    return Event({"choices": [{"index": 0, "text": piece, "finish_reason": finish}]})


def delta(finish: str | None = None, **fields: Any) -> Event:
    return Event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]})


def usage(output: int, prompt: int = 7) -> Event:
    return Event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


def answer(first: float, gaps: Sequence[float], tokens: int | None = None) -> list[Step]:
    """A whole completion: the first text after `first` seconds, the others after `gaps`; tokens: by the usage."""
    steps: list[Step] = [Wait(first), text("a", None if gaps else "length")]
    for number, gap in enumerate(gaps, 1):
        steps += [Wait(gap), text("b", "length" if number == len(gaps) else None)]
    return [*steps, usage(len(gaps) + 1 if tokens is None else tokens), DONE]


def run(server: Server, use: Callable[[Server], Any]) -> Any:
    """What `use`, a coroutine function, returns with the server running."""

    async def both() -> Any:
        async with server.running():
            return await use(server)

    return asyncio.run(both())
