"""Keeps the client's body for our handlers and gives vLLM's request classes a reduced body.

The classes of three releases refuse and rewrite different things: tools of agents, items without ids, parts of
messages. This innermost application before vLLM's routes therefore passes on only the fields by which vLLM samples,
schedules and stores, with a placeholder for the conversation. A warning about fields that the front end ignores becomes
a header of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from npu_gptoss.frontend import chat, messages
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.admission.keys import route_path
from npu_gptoss.serving.admission.middleware import PARSED, replayed
from npu_gptoss.serving.openai.engine import PLACEHOLDER

Json = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY, WARNINGS = "npu_gptoss.body", "npu_gptoss.warnings"  # keys in a request's scope
WARNING_HEADER = b"x-npu-gptoss-warning"
CHATS = ("/v1/chat/completions", "/invocations")
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"

# Fields of /v1/responses by which vLLM stores and schedules.
STORED = {
    *("model", "stream", "background", "previous_response_id", "request_id", "priority", "cache_salt"),
    *("session_id", "kv_transfer_params", "ec_transfer_params"),
}


def plain_chat(body: Mapping[str, Any]) -> Json:
    """Returns the fields that vLLM's chat class reads."""
    plain = {name: value for name, value in body.items() if name in chat.PASSED}
    if body.get("logprobs") and body.get("top_logprobs") is None:
        plain["top_logprobs"] = 0
    return plain | {"messages": PLACEHOLDER}


def plain_response(body: Mapping[str, Any]) -> Json:
    nulls = ("background", "stream", "priority")
    kept = {name: value for name, value in body.items() if name in STORED and not (value is None and name in nulls)}
    return kept | {"input": ""}


def plain_messages(body: Mapping[str, Any]) -> Json:
    model = body.get("model")
    own = {
        "model": model if isinstance(model, str) else "-",
        "messages": [{"role": "user", "content": "."}],
        "max_tokens": 1,
    }
    return own | ({"stream": body["stream"]} if isinstance(body.get("stream"), bool) else {})


def plain(route: str, body: Any, state: Any) -> Json | None:
    """Returns the body for vLLM's classes; None if vLLM's own handler takes the request."""
    if not isinstance(body, Mapping):
        return None
    if route in CHATS and "messages" in body:
        ours = is_ours(getattr(state, "openai_serving_chat", None)) and not body.get(chat.BEAM_SEARCH)
        return plain_chat(body) if ours else None
    if route == RESPONSES:
        return plain_response(body) if is_ours(getattr(state, "openai_serving_responses", None)) else None
    if route in (MESSAGES, COUNT):
        return plain_messages(body) if is_ours(getattr(state, "openai_serving_chat", None)) else None
    return None


def is_ours(serving: Any) -> bool:
    """True if our front end answers for this serving object: gpt-oss, and no tools that vLLM runs."""
    config = getattr(getattr(serving, "model_config", None), "hf_config", None)
    return getattr(config, "model_type", None) == MODEL_TYPE and getattr(serving, "tool_server", None) is None


class Intake:
    """The innermost ASGI application before vLLM's routes."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        route = route_path(scope)
        if route not in (*CHATS, RESPONSES, MESSAGES, COUNT):
            await self.app(scope, receive, send)
            return
        first = await receive()
        body = _parsed(scope, first)
        wanted = plain(route, body, scope["app"].state)
        if wanted is None:
            await self.app(scope, replayed(first, receive), send)
            return
        if route == MESSAGES and body.get("thread") is not None:  # vLLM's routes would drop the details
            from starlette.responses import JSONResponse

            await JSONResponse(messages.THREADS_REFUSED, 400)(scope, receive, send)
            return
        scope[BODY], scope[WARNINGS] = body, []
        raw = json.dumps(wanted).encode()
        scope["headers"] = [
            (name, str(len(raw)).encode() if name == b"content-length" else value) for name, value in scope["headers"]
        ]
        handed = {"type": "http.request", "body": raw, "more_body": False}
        await self.app(scope, replayed(handed, receive), _warning(scope, send))


def _parsed(scope: Message, first: Message) -> Any:
    """Reuses the JSON that admission has parsed, unless another application has changed the body since."""
    raw, body = scope.get(PARSED, (None, None))
    if raw is not None and raw == first.get("body"):
        return body
    if first.get("more_body") or first["type"] != "http.request":
        return None
    try:
        return json.loads(first.get("body", b""))
    except ValueError:
        return None


def _warning(scope: Message, send: Send) -> Send:
    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start" and scope[WARNINGS]:
            text = "; ".join(scope[WARNINGS]).encode("ascii", "backslashreplace").decode()
            shown = "".join(c if c.isprintable() else " " for c in text)[:1000]
            message["headers"] = [*message.get("headers", ()), (WARNING_HEADER, shown.encode())]
        await send(message)

    return sent


def body_of(raw_request: Any) -> Json | None:
    """Returns the client's body; None if the request came another way."""
    return None if raw_request is None else raw_request.scope.get(BODY)


class Written:
    """The client's body in the form that vLLM's `_check_model` logs on 0.33 (--enable-log-requests)."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.model, self.request_id, self._body = body.get("model"), body.get("request_id", "N/A"), body

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self._body, ensure_ascii=False)


def written(request: Any, raw_request: Any) -> Any:
    """Returns the client's body in place of vLLM's parsed request."""
    body = body_of(raw_request)
    return request if body is None else Written(body)


def warn(raw_request: Any, warnings: Sequence[str]) -> None:
    """Reports ignored fields of a request to the client, in a header, and in the log."""
    if not warnings:
        return
    from npu_gptoss.serving.openai.errors import logger

    logger.info("A request is served in part: %s", "; ".join(warnings)[:1000])
    if raw_request is not None and WARNINGS in raw_request.scope:
        raw_request.scope[WARNINGS].extend(warnings)
