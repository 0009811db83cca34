"""Keeps the client's body for our handlers and gives vLLM's request classes a reduced body.

The classes of three releases refuse and rewrite different things: tools of agents, items without ids, parts of
messages. This innermost application before vLLM's routes therefore passes on only the fields by which vLLM samples,
schedules and stores, with a placeholder for the conversation. A warning about fields that the front end ignores becomes
a header of the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_gptoss.frontend import chat, messages
from npu_gptoss.frontend.structure import FIELDS as STRUCTURE_FIELDS
from npu_gptoss.frontend.structure import structure_of
from npu_gptoss.harmony.encoding import ContextError, check_characters
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving import logger
from npu_gptoss.serving.admission.keys import route_path
from npu_gptoss.serving.admission.middleware import PARSED, replayed
from npu_gptoss.serving.admission.refusal import Message, Receive, Send

Json = dict[str, Any]

BODY, WARNINGS = "npu_gptoss.body", "npu_gptoss.warnings"  # keys in a request's scope
PLACEHOLDER = [{"role": "user", "content": ""}]  # replaces messages for vLLM's classes
KEEP_ALIVE = 15.0  # seconds
WARNING_HEADER = b"x-npu-gptoss-warning"
INVOCATIONS, TOKENIZE = "/invocations", "/tokenize"
CHATS, COMPLETIONS = ("/v1/chat/completions", INVOCATIONS), ("/v1/completions", INVOCATIONS)
RESPONSES, INPUT_TOKENS = "/v1/responses", "/v1/responses/input_tokens"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"

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
    own = {"model": body.get("model") or "-", "messages": [{"role": "user", "content": "."}], "max_tokens": 1}
    return own | ({"stream": body["stream"]} if isinstance(body.get("stream"), bool) else {})


def plain_completion(body: Mapping[str, Any]) -> Json:
    """Returns the body with its structure in the one field that each release's class reads: the other fields end 0.11's
    engine, or are dropped. max_tokens: null is its default, which 0.11 and 0.23 do not know. suffix: "" is none."""
    asked = structure_of(body)
    kept = {name: value for name, value in body.items() if name not in STRUCTURE_FIELDS}
    for name, nothing in (("max_tokens", None), ("suffix", "")):
        if kept.get(name, 1) == nothing:
            del kept[name]
    return kept | ({"structured_outputs": dict(asked.fields)} if asked else {})


# routes, the field by which a body of /invocations is known, the serving object in vLLM's state, the body for its class
PLAIN: tuple[tuple[tuple[str, ...], str, str, Callable[[Mapping[str, Any]], Json]], ...] = (
    (CHATS, "messages", "openai_serving_chat", plain_chat),
    (COMPLETIONS, "prompt", "openai_serving_completion", plain_completion),
    ((RESPONSES,), "", "openai_serving_responses", plain_response),
    ((MESSAGES, COUNT), "", "openai_serving_chat", plain_messages),
)
ROUTES = {TOKENIZE, INPUT_TOKENS}.union(*(routes for routes, *_ in PLAIN))


def plain(route: str, body: Any, state: Any) -> Json | None:
    """Returns the body for vLLM's classes; None if vLLM's own handler takes the request as it is."""
    if not isinstance(body, Mapping):
        return None
    for routes, field, serving, made in PLAIN:
        if route in routes and (not field or field in body):
            ours = is_ours(getattr(state, serving, None)) and not (field == "messages" and body.get(chat.BEAM_SEARCH))
            return made(body) if ours else None
    return None


def check_prompt(body: Mapping[str, Any], limit: int) -> None:
    """Raises ContextError for a completion's text that cannot fit, before vLLM encodes it."""
    prompts = body.get("prompt")
    for prompt in prompts if isinstance(prompts, list) else [prompts]:
        if isinstance(prompt, str) and body.get("truncate_prompt_tokens") is None:
            check_characters(limit, len(prompt))


async def answered(route: str, body: Any, state: Any) -> Any:
    """Returns the JSON or the ErrorResponse of a request that is answered here, without vLLM's routes; else None."""
    from npu_gptoss.serving.openai import chat as chats
    from npu_gptoss.serving.openai import responses
    from npu_gptoss.serving.openai.errors import refusal
    from npu_gptoss.serving.openai.release import release

    serving = getattr(state, "openai_serving_chat", None)
    if not isinstance(body, Mapping) or not is_ours(serving):
        return None
    if route == TOKENIZE and "messages" in body and not body.get("chat_template"):
        return await chats.tokenize(serving, body)
    if route == INPUT_TOKENS:
        return await responses.count(state.openai_serving_responses, body)
    if route in COMPLETIONS and "messages" not in body:
        try:
            check_prompt(body, release().max_model_len(serving))
        except ContextError as error:
            return refusal(error)
    return None


def is_gpt_oss(model_config: Any) -> bool:
    return getattr(getattr(model_config, "hf_config", None), "model_type", None) == MODEL_TYPE


def is_ours(serving: Any) -> bool:
    """True if our front end answers for this serving object: gpt-oss, and no tools that vLLM runs."""
    return is_gpt_oss(getattr(serving, "model_config", None)) and getattr(serving, "tool_server", None) is None


class Intake:
    """The innermost ASGI application before vLLM's routes."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        route = route_path(scope)
        if route not in ROUTES or PARSED not in scope:  # a body that admission has not checked is vLLM's to refuse
            await self.app(scope, receive, send)
            return
        first = await receive()
        body, state = _parsed(scope, first), scope["app"].state
        if (said := await answered(route, body, state)) is not None:
            await as_json(said)(scope, receive, send)
            return
        wanted = plain(route, body, state)
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
        sent = _Sent(scope, send)
        try:
            await self.app(scope, replayed(handed, receive), sent)
        finally:
            sent.end()


def as_json(said: Any) -> Any:
    """Returns the answer: of JSON, or of vLLM's error with its status."""
    from starlette.responses import JSONResponse

    return JSONResponse(said) if isinstance(said, dict) else JSONResponse(said.model_dump(), said.error.code)


def _parsed(scope: Message, first: Message) -> Any:
    """Reuses the JSON that admission has parsed, unless another application has changed the body since."""
    raw, body = scope[PARSED]
    if raw == first.get("body"):
        return body
    if first.get("more_body") or first["type"] != "http.request":
        return None
    try:
        return json.loads(first.get("body", b""))
    except ValueError:
        return None


class _Sent:
    """Sends an answer, with a header about ignored fields, and comments in a stream that is silent for KEEP_ALIVE.

    A stream is silent while a request waits or its prompt is computed, and while the model writes what the client does
    not see yet or at all (hidden reasoning, a forced call). Proxies close a connection without bytes, often after 60 s.
    """

    def __init__(self, scope: Message, send: Send) -> None:
        self._scope, self._send = scope, send
        self._sent_at = 0.0
        self._comments: asyncio.Task[None] | None = None

    async def __call__(self, message: Message) -> None:
        self._sent_at = time.monotonic()
        if message["type"] != "http.response.start":
            if not message.get("more_body"):
                self.end()
            await self._send(message)
            return
        headers = message["headers"] = list(message.get("headers", ()))
        if warnings := self._scope[WARNINGS]:
            text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()
            shown = "".join(c if c.isprintable() else " " for c in text)[:1000]
            headers.append((WARNING_HEADER, shown.encode()))
        await self._send(message)
        if dict(headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            self._comments = asyncio.create_task(self._comment())

    async def _comment(self) -> None:
        comment = {"type": "http.response.body", "body": b": keep-alive\n\n", "more_body": True}
        with contextlib.suppress(Exception):  # the client has left
            while True:
                await asyncio.sleep(max(self._sent_at + KEEP_ALIVE - time.monotonic(), 0.001))
                if time.monotonic() >= self._sent_at + KEEP_ALIVE:
                    self._sent_at = time.monotonic()
                    await self._send(comment)

    def end(self) -> None:
        if self._comments is not None:
            self._comments.cancel()
            # the task keeps how it ended, and so this object: a cycle would hold the request in memory for minutes
            self._comments = None


def body_of(raw_request: Any) -> Json | None:
    """Returns the client's body; None if the request came another way."""
    return None if raw_request is None else raw_request.scope.get(BODY)


class Written:
    """The client's body in the form that vLLM's `_check_model` logs on 0.33 (--enable-log-requests)."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.model, self.request_id, self._body = body.get("model"), body.get("request_id", "N/A"), body

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self._body, ensure_ascii=False)


def fields_of(request: Any) -> Json:
    """Returns what a client wrote, from vLLM's request: its class renames fields and keeps lists as iterators."""
    return request.model_dump(mode="json", by_alias=True, exclude_unset=True)


def written(request: Any, raw_request: Any) -> Any:
    """Returns the client's body in place of vLLM's parsed request."""
    body = body_of(raw_request)
    return request if body is None else Written(body)


def warn(raw_request: Any, warnings: Sequence[str]) -> None:
    """Reports ignored fields of a request to the client, in a header, and in the log."""
    if not warnings:
        return
    logger.info("A request is served in part: %s", "; ".join(warnings)[:1000])
    if raw_request is not None and WARNINGS in raw_request.scope:
        raw_request.scope[WARNINGS].extend(warnings)
