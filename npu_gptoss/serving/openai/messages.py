"""Anthropic's messages of gpt-oss: replaces vLLM's handlers, and adds the routes on 0.11, which has none.

vLLM's routes build Anthropic's JSON of an error: 0.23 takes its type from the error, 0.33 from the status. We set both.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import Request

from npu_gptoss.frontend import messages
from npu_gptoss.serving.openai import intake
from npu_gptoss.serving.openai.chat import answer_object, output_logger
from npu_gptoss.serving.openai.engine import Started, encoder_of, start, use
from npu_gptoss.serving.openai.errors import failure, log_failure, refused
from npu_gptoss.serving.openai.release import release

if TYPE_CHECKING:
    from fastapi import FastAPI

Json = dict[str, Any]


async def create(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Replaces `create_messages`. Returns an error, an answer or a stream of events, as vLLM's route expects."""
    if not intake.is_ours(self):
        return await original(self, request, raw_request)
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesResponse

    answered = await _answered(self, _body(request, raw_request), raw_request)
    return (
        answer_object(AnthropicMessagesResponse, answered, raw_request) if isinstance(answered, Mapping) else answered
    )


async def count(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Replaces `count_tokens`."""
    if not intake.is_ours(self):
        return await original(self, request, raw_request)
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensResponse

    answered = await _counted(self, _body(request, raw_request), raw_request)
    return AnthropicCountTokensResponse(**answered) if isinstance(answered, Mapping) else answered


def _body(request: Any, raw_request: Any) -> Mapping[str, Any]:
    body = intake.body_of(raw_request)
    return request.model_dump(exclude_unset=True, by_alias=True) if body is None else body


async def _answered(serving: Any, body: Mapping[str, Any], raw_request: Any) -> Any:
    """Returns an answer's JSON, the events of a stream, or an error of vLLM's class."""
    try:
        if (error := await _unknown(serving, body)) is not None:
            return error
        wanted = messages.read(body, release().defaults(serving))
        intake.warn(raw_request, wanted.asked.warnings)
        name = f"msg_{serving._base_request_id(raw_request, body.get('request_id'))}"
        started = await start(serving, wanted.asked, name, raw_request, stream=wanted.stream)
        answer = messages.Answer(wanted, _facts(started, wanted), started.turn)
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
    model = body.get("model")
    if not isinstance(model, str) or not model:
        return _refused("model: expected the name of a model, as /v1/models lists them.", HTTPStatus.BAD_REQUEST)
    unknown = await serving._check_model(intake.Written(body))
    return None if unknown is None else _refused(unknown.error.message, unknown.error.code)


def _facts(started: Started, wanted: messages.Request) -> messages.Facts:
    serving = started.serving
    return messages.Facts(
        id=started.name,
        model=started.model,
        prompt_tokens=len(started.prompt),
        cached_details=serving.enable_prompt_tokens_details,
        log=output_logger(serving, started.name, wanted.stream),
    )


def _last_event(answer: messages.Answer, raw_request: Any, error: Exception | None) -> Iterator[str]:
    if error is None:
        use(raw_request, answer.counts)
    else:
        log_failure("a streamed message failed", error)
        known = failure(error).error
        yield messages.error_event(known.message, known.code)


def _failed(error: Exception) -> Any:
    """Returns the answer to a request that raised this error."""
    known = failure(error).error
    if known.code >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log_failure("a message failed", error)
    return _refused(known.message, known.code)


def _refused(message: str, status: int) -> Any:
    return refused(message, status=status, kind=messages.error_type(status))


def add_routes(app: FastAPI) -> None:
    """Adds the routes to vLLM 0.11's application."""
    from fastapi import Depends
    from fastapi.responses import JSONResponse, StreamingResponse
    from vllm.entrypoints.openai.api_server import validate_json_request
    from vllm.entrypoints.utils import load_aware_call, with_cancellation

    async def respond(made: Callable[..., Any], request: Json, raw_request: Request) -> Any:
        serving = raw_request.app.state.openai_serving_chat
        if not intake.is_ours(serving):
            answered = _refused("The served model has no Messages API.", HTTPStatus.NOT_FOUND)
        else:
            body = intake.body_of(raw_request)
            answered = await made(serving, request if body is None else body, raw_request)
        if isinstance(answered, Mapping):
            return JSONResponse(answered)
        if isinstance(answered, release().ErrorResponse):
            error = answered.error
            return JSONResponse(messages.error_body(error.message, error.code), status_code=error.code)
        return StreamingResponse(answered, media_type="text/event-stream")

    # `request` makes FastAPI read the body, which `with_cancellation` needs
    @with_cancellation
    @load_aware_call
    async def create_messages(request: dict[str, Any], raw_request: Request) -> Any:
        return await respond(_answered, request, raw_request)

    @with_cancellation
    @load_aware_call
    async def count_tokens(request: dict[str, Any], raw_request: Request) -> Any:
        return await respond(_counted, request, raw_request)

    for route, endpoint in ((intake.MESSAGES, create_messages), (intake.COUNT, count_tokens)):
        app.add_api_route(
            route, endpoint, methods=["POST"], dependencies=[Depends(validate_json_request)], response_model=None
        )
