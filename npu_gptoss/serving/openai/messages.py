"""Routes of Anthropic's messages for gpt-oss, in front of vLLM's own, on each release."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import Request

from npu_gptoss.frontend import messages
from npu_gptoss.harmony.encoding import ContextError
from npu_gptoss.serving.openai import intake
from npu_gptoss.serving.openai.engine import encoder_of, facts_of, start, use
from npu_gptoss.serving.openai.errors import failed, failure, log_failure, refused
from npu_gptoss.serving.openai.release import release
from npu_gptoss.serving.releases import vllm as names

if TYPE_CHECKING:
    from fastapi import FastAPI

Json = dict[str, Any]


async def _answered(serving: Any, body: Mapping[str, Any], raw_request: Any) -> Any:
    """Returns an answer's JSON, the events of a stream, or an error of vLLM's class."""
    try:
        if (error := await _unknown(serving, body)) is not None:
            return error
        wanted = messages.read(body, release().defaults(serving))
        intake.warn(raw_request, wanted.asked.warnings)
        name = f"msg_{serving._base_request_id(raw_request, body.get('request_id'))}"
        started = await start(serving, wanted.asked, name, raw_request, stream=wanted.stream)
        answer = messages.Answer(wanted, facts_of(messages.Facts, started), started.turn)
        if wanted.stream:
            return answer.stream(started.outputs, started.step, functools.partial(_last_event, answer, raw_request))
        answered = await answer.whole(started.outputs, started.step)
        use(raw_request, answer.counts)
    except Exception as error:
        return _failed(error)
    return answered


async def _counted(serving: Any, body: Mapping[str, Any], raw_request: Any) -> Any:
    """Returns a count's JSON. It has no limit: clients count to learn that a conversation is too long."""
    try:
        if (error := await _unknown(serving, body)) is not None:
            return error
        wanted = messages.read(body, release().defaults(serving), counting=True)
        intake.warn(raw_request, wanted.asked.warnings)
        return {"input_tokens": len(await asyncio.to_thread(wanted.asked.prompt, encoder_of(serving)))}
    except Exception as error:
        return _failed(error)


async def _unknown(serving: Any, body: Mapping[str, Any]) -> Any:
    if not body.get("model"):
        return _refused("model: expected the name of a model, as /v1/models lists them.", HTTPStatus.BAD_REQUEST)
    unknown = await serving._check_model(intake.Written(body))
    return None if unknown is None else _refused(unknown.error.message, unknown.error.code)


def _last_event(answer: messages.Answer, raw_request: Any, error: Exception | None) -> Iterator[str]:
    if error is None:
        use(raw_request, answer.counts)
    else:
        log_failure("a streamed message failed", error)
        known = failure(error).error
        yield messages.error_event(known.message, known.code)


def _failed(error: Exception) -> Any:
    """Returns the answer to a request that raised this error."""
    known = failed("a message failed", error).error
    return _refused(messages.context_words(error) if isinstance(error, ContextError) else known.message, known.code)


def _refused(message: str, status: int) -> Any:
    return refused(message, status=status, kind=messages.error_type(status))


def add_routes(app: FastAPI) -> None:
    """Adds the routes before vLLM's own, which get the requests for another model."""
    from fastapi import Depends
    from fastapi.responses import JSONResponse, StreamingResponse
    from fastapi.routing import APIRoute
    from starlette.routing import Match

    class OurRoute(APIRoute):
        def matches(self, scope: Any) -> Any:
            ours = intake.is_ours(getattr(scope["app"].state, "openai_serving_chat", None))
            return super().matches(scope) if ours else (Match.NONE, {})

    async def respond(made: Callable[..., Any], request: Json, raw_request: Request) -> Any:
        state, body = raw_request.app.state, intake.body_of(raw_request)
        serving = getattr(state, "anthropic_serving_messages", None) or state.openai_serving_chat  # 0.11 has the second
        answered = await made(serving, request if body is None else body, raw_request)
        if isinstance(answered, Mapping):
            return JSONResponse(answered)
        if isinstance(answered, names.ErrorResponse):
            error = answered.error
            return JSONResponse(messages.error_body(error.message, error.code), status_code=error.code)
        return StreamingResponse(answered, media_type="text/event-stream")

    # `request` makes FastAPI read the body, which `with_cancellation` needs
    @names.with_cancellation
    @names.load_aware_call
    async def answer(request: dict[str, Any], raw_request: Request) -> Any:
        return await respond(_answered, request, raw_request)

    @names.with_cancellation
    @names.load_aware_call
    async def count(request: dict[str, Any], raw_request: Request) -> Any:
        return await respond(_counted, request, raw_request)

    for path, endpoint in ((intake.MESSAGES, answer), (intake.COUNT, count)):
        guards = [Depends(names.validate_json_request)]
        route = OurRoute(path, endpoint, methods=["POST"], dependencies=guards, response_model=None)
        app.router.routes.insert(0, route)
