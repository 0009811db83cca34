"""The gate before a server that takes everything: what it refuses, and what it does to what it lets through."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from npu_gptoss.serving.admission.gate import Gate
from npu_gptoss.serving.admission.keys import KeyGuard
from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.admission.rules import Limits
from tests.serving.hostile import HOSTILE, Hostile

LIMITS = Limits(vocab_size=201_088, tokenizer_size=200_019, max_model_len=2048, max_logprobs=20)
JSON = ((b"content-type", b"application/json"),)
CHAT = "/v1/chat/completions"
BODY = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


class Taken:
    """A server that reads the body, answers 200, and remembers what it received; `fails` is raised instead."""

    def __init__(self, fails: BaseException | None = None, begins: bool = False) -> None:
        self.fails, self.begins, self.received, self.scopes = fails, begins, [], []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scopes.append(scope)
        if scope["type"] == "websocket":
            await send({"type": "websocket.accept"})
            return
        self.received.append((await receive())["body"])
        if self.fails is None or self.begins:
            await send({"type": "http.response.start", "status": 200, "headers": []})
        if self.fails is not None:
            raise self.fails
        await send({"type": "http.response.body", "body": b""})


class AnyServer:
    async def limits(self) -> Limits:
        return LIMITS

    async def check_structure(self, route: str, body: dict[str, Any]) -> None:
        pass

    def blame(self, error: BaseException) -> Refusal | None:
        return Refusal("unreadable") if isinstance(error, KeyError) else None


def gate(app: Any = None, keys: tuple[str, ...] = (), open_metrics: bool = False, max_body: int = 1 << 20) -> Gate:
    return Gate(app or Taken(), KeyGuard(keys, open_metrics), AnyServer(), max_body)


def ask(
    asked: Gate,
    path: str = CHAT,
    body: bytes | list[bytes] = b"",
    method: str = "POST",
    headers: tuple[tuple[bytes, bytes], ...] = JSON,
    **scope: Any,
) -> tuple[int | None, dict[str, Any]]:
    """Status and JSON of the answer; status None when nothing was sent."""
    chunks = list(body) if isinstance(body, list) else [body]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if not chunks:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": chunks.pop(0), "more_body": bool(chunks)}

    async def send(message: Any) -> None:
        sent.append(message)

    whole = {"type": "http", "method": method, "path": path, "headers": list(headers)} | scope
    asyncio.run(asked(whole, receive, send))
    if not sent:
        return None, {}
    text = b"".join(message.get("body", b"") for message in sent)
    return sent[0].get("status"), json.loads(text) if text else {}


BY_THE_GATE = [case for case in HOSTILE if case.needs == "gate"]


@pytest.mark.parametrize("case", BY_THE_GATE, ids=lambda case: case.name)
def test_hostile_request_is_refused_at_the_gate(case: Hostile) -> None:
    app = Taken()
    status, told = ask(gate(app), case.route, case.body)
    assert status == case.status
    if status == 200:
        assert app.received == [case.body]
        return
    assert not app.received, "vLLM has heard of it"
    error = told["error"]
    assert (error["param"], error["code"]) == (case.param, 400)
    assert error["message"].isprintable()
    assert len(error["message"]) < 500
    assert case.param is None or case.param in error["message"]
