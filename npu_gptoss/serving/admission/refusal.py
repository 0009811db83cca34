"""Refusals of a request: field, expected value and actual value, in the error form of its API."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from npu_gptoss.errors import quoted, short

ANTHROPIC = "/v1/messages"  # and the routes below it
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def shown(value: Any) -> str:
    """Formats a value in at most about 200 characters and escapes unprintable ones."""
    if value is True or value is False or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    return quoted(value)


def escaped(text: str, limit: int = 1000) -> str:
    """Formats a foreign text, such as a library's error, as one printable line of limited length."""
    return short(text.strip().replace("\n", " "), limit)


@dataclass(eq=False)
class Refusal(Exception):
    """The reason why a request is refused."""

    message: str
    param: str | None = None
    status: HTTPStatus = HTTPStatus.BAD_REQUEST
    retry_after: int | None = None  # seconds

    def body(self, route: str = "") -> bytes:
        """Returns the answer's JSON: in OpenAI's form, or in Anthropic's on the routes of its API."""
        if route.startswith(ANTHROPIC):
            from npu_gptoss.frontend.messages import error_body

            return json.dumps(error_body(self.message, int(self.status))).encode()
        kind = "BadRequestError" if self.status == HTTPStatus.BAD_REQUEST else self.status.phrase
        error = {"message": self.message, "type": kind, "param": self.param, "code": int(self.status)}
        return json.dumps({"error": error}).encode()


def refuse(param: str | None, expected: str, got: Any) -> Refusal:
    """Makes a Refusal. `got` is the client's value, or an instance of `Said` with our own words."""
    seen = got if isinstance(got, Said) else shown(got)
    return Refusal(f"{param or 'The body'}: expected {expected}, got {seen}.", param)


class Said(str):
    """Our own words about a value, printed unchanged."""


async def answer(send: Send, refusal: Refusal, headers: tuple[tuple[bytes, bytes], ...] = (), route: str = "") -> None:
    body = refusal.body(route)
    length = str(len(body)).encode()
    base = ((b"content-type", b"application/json"), (b"content-length", length))
    if refusal.retry_after is not None:
        headers = (*headers, (b"retry-after", str(refusal.retry_after).encode()))
    await send({"type": "http.response.start", "status": int(refusal.status), "headers": [*base, *headers]})
    await send({"type": "http.response.body", "body": body})
