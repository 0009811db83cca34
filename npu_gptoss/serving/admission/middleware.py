"""The ASGI application in front of vLLM's: checks the key and the complete body, then passes the request on.

An accepted request goes on unchanged: the same bytes, then the client's later messages, so that vLLM still sees a
disconnect. A refused request is answered here, before a stream begins.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any

from npu_gptoss.serving import logger
from npu_gptoss.serving.admission import body as bodies
from npu_gptoss.serving.admission import fields
from npu_gptoss.serving.admission.keys import CHALLENGE, KeyGuard, route_path
from npu_gptoss.serving.admission.refusal import Message, Receive, Refusal, Send, answer
from npu_gptoss.serving.admission.rules import Limits

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LARGE = 128 * 1024  # bytes; a thread reads larger bodies, so that /health does not wait
LEAVES = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)
PARSED = "npu_gptoss.parsed"  # key in a request's scope: the body's bytes and the parsed JSON
HEALTH = ("/health", "/ping")


class _Gone(Exception):
    """The client left before its body was complete."""


class AdmissionMiddleware:
    """`server` answers the questions about vLLM's: `compat.server.admission.VllmServer`."""

    def __init__(self, app: App, keys: KeyGuard, server: Any, max_body: int) -> None:
        self.app, self.keys, self.server, self.max_body = app, keys, server, max_body

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
        if scope["type"] == "websocket":
            return await self.app(scope, receive, send)
        if (route := route_path(scope)) in HEALTH:
            try:
                await self.server.check_engine(waits=False)
            except Refusal as refusal:
                return await answer(send, refusal)
        if scope["method"] != "POST":
            return await self.app(scope, receive, send)
        try:
            if route not in HEALTH:
                await self.server.check_engine(waits=True)
            await self._post(scope, receive, send)
        except Refusal as refusal:
            self.server.refused(refusal.status)
            await answer(send, refusal, route=route_path(scope))
        except _Gone:
            pass

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        # with duplicate headers the first counts, as in vLLM
        route, headers = route_path(scope), dict(reversed(scope["headers"]))
        raw = await self._whole_body(headers, receive)
        again = replayed({"type": "http.request", "body": raw, "more_body": False}, receive)
        self.server.check_route(route)
        fields.check_query(route, scope.get("query_string", b""))
        if not raw or not _is_json(headers):
            return await self._watched(scope, again, send)
        limits = await self.server.limits()
        fields.check_headers(headers, limits)
        check = functools.partial(_checked, route, raw, limits)
        body = await asyncio.to_thread(check) if len(raw) > LARGE else check()
        scope[PARSED] = raw, body
        await self.server.check_structure(route, body)
        return await self._watched(scope, again, send)

    async def _whole_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Reads the body and holds at most `max_body` bytes."""
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared[:20]) > self.max_body:
            raise self._too_large()
        chunks, held = [], 0
        while True:
            try:
                message = await receive()
            except asyncio.CancelledError:  # uvicorn's, at the end of a server
                stops = "The body: expected all of it, got a part, and the server is shutting down. Send it again."
                raise Refusal(stops, status=HTTPStatus.SERVICE_UNAVAILABLE) from None
            if message["type"] == "http.disconnect":
                raise _Gone
            chunk = message.get("body", b"")
            held += len(chunk)
            if held > self.max_body:
                raise self._too_large()
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _too_large(self) -> Refusal:
        said = f"The body: expected at most {self.max_body} bytes, got more."
        return Refusal(said, status=HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

    async def _watched(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the request. If vLLM fails while parsing it, the client gets a refusal."""
        begun = False

        async def noticed(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, receive, noticed)
        except LEAVES:
            raise
        except BaseException as error:  # a panic in a Rust library is no Exception
            refusal = None if begun else self.server.blame(error)
            if refusal is None:
                raise
            logger.info("npu-gptoss refuses a request that vLLM failed at: %s", type(error).__name__)
            raise refusal from None


def _checked(route: str, raw: bytes, limits: Limits) -> dict[str, Any]:
    body = bodies.read(raw)
    fields.check(route, body, limits)
    return body


def _is_json(headers: Mapping[bytes, bytes]) -> bool:
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    return media == b"application/json" or media.endswith(b"+json")


def replayed(first: Message, receive: Receive) -> Receive:
    """Returns a `receive` that gives the body as one message, then the client's later messages (a disconnect)."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return first

    return replay
