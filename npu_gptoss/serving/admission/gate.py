"""The ASGI application that stands before vLLM's: lets in, reads the body whole, checks it, and hands both on.

A request that passes goes on exactly as it came: the same bytes, then whatever the client sends after them, so that
vLLM still hears of a disconnect. What is refused is answered here, before a stream can begin.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Protocol

from npu_gptoss.serving.admission import body as bodies
from npu_gptoss.serving.admission import fields
from npu_gptoss.serving.admission.keys import CHALLENGE, KeyGuard, route_path
from npu_gptoss.serving.admission.refusal import Message, Receive, Refusal, Send, answer, refuse
from npu_gptoss.serving.admission.rules import Limits

logger = logging.getLogger("vllm.npu_gptoss")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGE = 128 * 1024  # bytes: from here a body is read in a thread, so that /health does not wait
LEAVES = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
PARSED = "npu_gptoss.parsed"  # in the scope of a request: the body's bytes, and what JSON they are
_NO_LIMITS = Limits(0, 0, 0, 0)


class Server(Protocol):
    """What the gate has to know of the server behind it."""

    def prepare(self) -> None:
        """The server is about to listen."""

    def close(self) -> None:
        """The server has ended."""

    def check_route(self, route: str) -> None:
        """Raises Refusal where the served model has nothing to answer with."""

    async def limits(self) -> Limits: ...

    async def check_structure(self, route: str, body: dict[str, Any]) -> None:
        """Raises Refusal for a grammar, expression or schema that cannot be compiled."""

    def refused(self, status: HTTPStatus) -> None:
        """A request was refused before vLLM, which counts answers, saw it."""

    def blame(self, error: BaseException) -> Refusal | None:
        """The refusal, if the server raised this while it was only reading the request."""


class _Gone(Exception):
    """The client left before its body was whole."""


class Gate:
    def __init__(self, app: App, keys: KeyGuard, server: Server, max_body: int) -> None:
        self.app, self.keys, self.server, self.max_body = app, keys, server, max_body
        self._running: set[tuple[str, str]] = set()  # ids that clients chose for requests in flight

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self.server.prepare()
            try:
                return await self.app(scope, receive, send)
            finally:
                self.server.close()
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        objection = self.keys.objection(scope)
        if objection is not None:
            self.server.refused(objection.status)
            if scope["type"] == "websocket":
                return await send({"type": "websocket.close", "code": 1008})
            return await answer(send, objection, CHALLENGE, route_path(scope))
        if scope["type"] == "websocket" or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        try:
            await self._post(scope, receive, send)
        except Refusal as refusal:
            self.server.refused(refusal.status)
            await answer(send, refusal, route=route_path(scope))
        except _Gone:
            pass

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        # the first of a name counts, as for whoever reads the request behind this
        route, headers = route_path(scope), dict(reversed(scope["headers"]))
        raw = await self._whole_body(headers, receive)
        again = replayed({"type": "http.request", "body": raw, "more_body": False}, receive)
        self.server.check_route(route)
        if not raw or not (route in fields.ALWAYS_JSON or _is_json(headers)):
            return await self.app(scope, again, send)
        limits = await self.server.limits()
        fields.check_priority_header(headers, limits)
        check = functools.partial(_checked, route, raw, limits)
        body = await asyncio.to_thread(check) if len(raw) > LARGE else check()
        scope[PARSED] = raw, body
        await self.server.check_structure(route, body)
        own = _own_id(route, headers, body)
        if own is None:
            return await self._watched(scope, again, send)
        if own in self._running:
            raise refuse("request_id", "an id that no request in flight has", own[1])
        self._running.add(own)
        try:
            await self._watched(scope, again, send)
        finally:
            self._running.discard(own)

    async def _whole_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """At most `max_body` bytes are ever held."""
        too_large = Refusal(
            f"The body: expected at most {self.max_body} bytes, got more.", status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE
        )
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.max_body:
            raise too_large
        chunks, held = [], 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            held += len(chunk)
            if held > self.max_body:
                raise too_large
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request; where vLLM fails because it cannot even read it, the client is told."""
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noticed)
        except LEAVES:
            raise
        except BaseException as error:  # what a library in Rust raises when it fails is no Exception
            refusal = None if begun else self.server.blame(error)
            if refusal is None:
                raise
            logger.info("npu-gptoss refuses a request that vLLM could not read: %s", type(error).__name__)
            raise refusal from None


def _checked(route: str, raw: bytes, limits: Limits) -> dict[str, Any]:
    body = bodies.read(raw)
    fields.check(route, body, limits)
    return body


def _is_json(headers: Mapping[bytes, bytes]) -> bool:
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")


def _own_id(route: str, headers: Mapping[bytes, bytes], body: dict[str, Any]) -> tuple[str, str] | None:
    """The kind of a request and the id by which the engine will know it, if the client chose it; else None."""
    if route not in fields.GENERATE:
        return None
    header = headers.get(b"x-request-id") if route != fields.RESPONSES_ROUTE else None  # which reads no header
    chosen = body.get("request_id") if header is None else header.decode("latin-1")
    if not isinstance(chosen, str):
        return None
    fields.REQUEST_ID(chosen, _NO_LIMITS, "request_id" if header is None else "X-Request-Id")
    own = route in (fields.RESPONSES_ROUTE, fields.MESSAGES_ROUTE)
    kind = route if own else "chat" if "messages" in body else "completion"
    return kind, chosen


def replayed(first: Message, receive: Receive) -> Receive:
    """The body as one message, then what the client sends, which is that it leaves."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return first

    return replay
