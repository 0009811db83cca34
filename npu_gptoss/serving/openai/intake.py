"""What a client wrote and what vLLM's request classes read: two bodies of one request.

The classes of three releases refuse and rewrite different things: tools of agents, items without ids, parts of
messages. So the innermost application before vLLM's routes keeps the client's own body for the handlers, and hands on
what vLLM samples, schedules and stores by, with a placeholder for the conversation. A warning about what the front end
leaves out becomes a header of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from typing import Any

from npu_gptoss.frontend import chat, messages
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.admission.gate import PARSED, replayed
from npu_gptoss.serving.admission.keys import route_path
from npu_gptoss.serving.openai.engine import PLACEHOLDER

Json = dict[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY, WARNINGS = "npu_gptoss.body", "npu_gptoss.warnings"  # in the scope of a request
WARNING_HEADER = b"x-npu-gptoss-warning"
CHATS = ("/v1/chat/completions", "/invocations")
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"

# Fields of /v1/responses by which vLLM stores and schedules.
STORED = {
    *("model", "stream", "background", "previous_response_id", "request_id", "priority", "cache_salt"),
    *("session_id", "kv_transfer_params", "ec_transfer_params"),
}


def plain_chat(body: Mapping[str, Any]) -> Json:
    """What vLLM's class of chats reads of one."""
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
    """The body for vLLM's classes; None where the request is left to vLLM's own handler, or is another's."""
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
    """Whether requests of this serving object are the front end's: of gpt-oss, and without tools that vLLM runs."""
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
        if route == MESSAGES and body.get("thread") is not None:  # vLLM's routes would lose the details
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
    """The gate has read the body already, unless somebody in between has changed it."""
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
    """The client's own body; None where the request came by another way."""
    return None if raw_request is None else raw_request.scope.get(BODY)


class Written:
    """A request as its client wrote it, for vLLM's `_check_model`, which logs it on 0.33 (--enable-log-requests)."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.model, self.request_id, self._body = body.get("model"), body.get("request_id", "N/A"), body

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self._body, ensure_ascii=False)


def written(request: Any, raw_request: Any) -> Any:
    """The client's own body in the place of what vLLM's class has of it."""
    body = body_of(raw_request)
    return request if body is None else Written(body)


def warn(raw_request: Any, warnings: Sequence[str]) -> None:
    """Tell the client, in a header, and the log what of a request has no effect."""
    if not warnings:
        return
    from npu_gptoss.serving.openai.errors import logger

    logger.info("A request is served in part: %s", "; ".join(warnings)[:1000])
    if raw_request is not None and WARNINGS in raw_request.scope:
        raw_request.scope[WARNINGS].extend(warnings)
