"""/v1/responses: the output items of a turn and the events that tell them, from one reading (`turn`).

A streamed item is the item of the final response: same id, same text, same status. The events are those of OpenAI's
specification, in its order: `output_item.added`, the parts' or the arguments' own, `output_item.done`; at the end
`response.completed`, `.incomplete` when the output was cut off, `.failed` with the reason when generating failed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any, get_args

from openai.types.responses import (
    ResponseCompletedEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseOutputMessage,
    ResponseReasoningItem,
    ResponseStreamEvent,
)
from pydantic import SerializerFunctionWrapHandler, create_model, model_serializer

from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.streaming import log_failure
from npu_gptoss.serving.compat.targets import CONTEXT, RESPONSES, RESPONSES_CONTEXT, RESPONSES_SERVING
from npu_gptoss.serving.compat.turn import Event, Part, Turn, assistant_turn, reading_of

if TYPE_CHECKING:
    from openai.types.responses import ResponseOutputItem
    from vllm.outputs import RequestOutput

PREFIX = {Kind.REASONING: "rs", Kind.ANSWER: "msg", Kind.CALL: "fc"}  # of an item's id
# of the events that tell a part's text
TEXT = {Kind.REASONING: "reasoning_text", Kind.ANSWER: "output_text", Kind.CALL: "function_call_arguments"}
ITEMS = (
    "_process_harmony_streaming_events ._make_response_output_items_with_harmony .responses_full_generator "
    ".responses_stream_generator .responses_background_stream_generator"
)
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
# an event's type -> its class
EVENTS = {
    get_args(event.model_fields["type"].annotation)[0]: event for event in get_args(get_args(ResponseStreamEvent)[0])
}


class Answer:
    """The answer to one request: reads its tokens, and keeps the events that the stream has not sent yet."""

    def __init__(self, turn: Turn, streamed: bool) -> None:
        from vllm.utils import random_uuid

        self.turn = turn
        self._streamed = streamed
        self._new_id: Callable[[], str] = random_uuid
        self._ids: list[str] = []  # of the parts, without the prefix
        self._events: list[Any] = []

    def read(self, output: RequestOutput) -> None:
        for completion in output.outputs[:1]:  # /v1/responses has one
            for token in completion.token_ids:
                self._take(self.turn.feed(token))
            if completion.finish_reason is not None:
                self._take(self.turn.end(completion.finish_reason))

    def new_events(self) -> list[Any]:
        """Events of the stream since the last call, without a sequence number."""
        events, self._events = self._events, []
        return events

    def items(self) -> list[ResponseOutputItem]:
        return [self._item(part) for part in self.turn.parts]

    def _id(self, part: Part) -> str:
        return f"{PREFIX[part.kind]}_{self._ids[part.number]}"

    def _item(self, part: Part, empty: bool = False) -> ResponseOutputItem:
        status = {None: "in_progress", True: "completed", False: "incomplete"}[part.complete]
        own = {"id": self._id(part), "status": status}
        if part.kind is Kind.CALL:
            arguments, call_id = "" if empty else part.text, f"call_{self._ids[part.number]}"
            return ResponseFunctionToolCall(
                type="function_call", call_id=call_id, name=part.name, arguments=arguments, **own
            )
        content = [] if empty else [_content(part.kind, part.text)]
        if part.kind is Kind.ANSWER:
            return ResponseOutputMessage(type="message", role="assistant", content=content, **own)
        return ResponseReasoningItem(type="reasoning", summary=[], content=content, **own)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.what == "begun":
                self._ids.append(self._new_id())
            if self._streamed:
                self._events += self._shown(event)

    def _event(self, name: str, of: Part, /, **fields: Any) -> Any:
        """An event of the stream with those of the places that its class has."""
        made = EVENTS[f"response.{name}"]
        places = {"item_id": self._id(of), "output_index": of.number, "content_index": 0, "sequence_number": -1}
        fields |= {place: value for place, value in places.items() if place in made.model_fields}
        return made(type=f"response.{name}", **fields)

    def _shown(self, event: Event) -> list[Any]:
        part, name = event.part, TEXT[event.part.kind]
        has_content = part.kind is not Kind.CALL
        logprobs = {"logprobs": []} if part.kind is Kind.ANSWER else {}
        if event.what == "begun":
            shown = [self._event("output_item.added", part, item=self._item(part, empty=True))]
            if has_content:
                shown.append(self._event("content_part.added", part, part=_content(part.kind, "")))
            return shown
        if event.what == "more":
            return [self._event(f"{name}.delta", part, delta=event.text, **logprobs)]
        if has_content:
            content = _content(part.kind, part.text)
            shown = [self._event(f"{name}.done", part, text=part.text, **logprobs)]
            shown.append(self._event("content_part.done", part, part=content))
        else:  # newer clients want the name, older ones leave it aside
            shown = [self._event(f"{name}.done", part, arguments=part.text, name=part.name)]
        return [*shown, self._event("output_item.done", part, item=self._item(part))]


def _content(kind: Kind, text: str) -> dict[str, Any]:
    """An item's content part: items and events have classes of their own for it."""
    return {"type": TEXT[kind], "text": text} | ({"annotations": [], "logprobs": []} if kind is Kind.ANSWER else {})


@repair(
    "responses-outputs",
    f"{CONTEXT}:HarmonyContext.append_output StreamingHarmonyContext.append_output",
    lines=("0.11",),
)
def install_answers(context: ModuleType) -> None:
    """The contexts of /v1/responses do not hand their outputs to the reading that responses-items uses."""
    _hand_over(context)


@repair(
    "responses-outputs",
    f"{RESPONSES_CONTEXT}:HarmonyContext.append_output StreamingHarmonyContext.append_output",
    lines=("0.23",),
)
def install_answers_0_23(context: ModuleType) -> None:
    """The contexts of /v1/responses do not hand their outputs to the reading that responses-items uses."""
    _hand_over(context)


def _hand_over(context: ModuleType) -> None:
    for kind in (context.HarmonyContext, context.StreamingHarmonyContext):
        expect_parameters(kind.append_output, "self", "output")
        around(kind, "append_output")(_append_output)


def _append_output(original: Callable[[Any, Any], None], self: Any, output: Any) -> None:
    original(self, output)
    answer = getattr(self, "npu_gptoss_answer", None)
    if answer is not None and not isinstance(output, list):
        answer.read(output)


@repair("responses-usage", f"{RESPONSES_SERVING}:ResponsesResponse", lines=("0.23",))
def install_usage(serving: ModuleType) -> None:
    """The usage of a response has lists beside OpenAI's numbers, which its agents in JavaScript refuse: every streamed
    run of theirs ends with an error."""
    original = serving.ResponsesResponse
    expect_parameters(original, "usage")

    class ResponsesResponse(original):
        @model_serializer(mode="wrap")
        def _with_numbers_alone(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
            told = handler(self)
            usage = told.get("usage") or {}
            for part in ("input_tokens_details", "output_tokens_details"):
                if part in usage:
                    usage[part] = {name: value for name, value in usage[part].items() if not isinstance(value, list)}
            return told

    replace(serving, "ResponsesResponse", ResponsesResponse)


@repair(
    "responses-items",
    f"{RESPONSES}:OpenAIServingResponses.{ITEMS}",
    lines=("0.11",),
    upstream="vllm issues 23222 and 45742, PRs 24317, 29947 and 45745",
)
def install_items(serving_responses: ModuleType) -> None:
    """A streamed response has no function call, other ids than the final one, items numbered so that OpenAI's
    client fails, and not closed when they are cut off, and ends with response.completed in any case."""
    _tell_items(serving_responses)


@repair(
    "responses-items",
    f"{RESPONSES_SERVING}:OpenAIServingResponses.{ITEMS}",
    lines=("0.23",),
    upstream="vllm issue 45742, PR 45745",
)
def install_items_0_23(serving: ModuleType) -> None:
    """A streamed response has other ids than the final one, items that are not closed when they are cut off, and ends
    with response.completed in any case; a forced call is a message, and a stop string stays in its text."""
    _tell_items(serving)


def _tell_items(serving_responses: ModuleType) -> None:
    serving = serving_responses.OpenAIServingResponses
    events = serving._process_harmony_streaming_events
    items = serving._make_response_output_items_with_harmony
    whole = serving.responses_full_generator
    stream = serving.responses_stream_generator
    background = serving.responses_background_stream_generator
    expect_parameters(events, "result_generator", "context", "created_time", "_increment_sequence_number_and_return")
    expect_parameters(items, "self", "context")
    expect_parameters(whole, "self", "request", "context")
    expect_source(whole, "output = self._make_response_output_items_with_harmony(context)", 'status = "incomplete"')
    expect_parameters(stream, "self", "request", "sampling_params", "context", "model_name", "created_time")
    expect_source(stream, "ResponseCompletedEvent(")
    expect_parameters(background, "self", "response_id")
    failed_response = serving_responses.ResponsesResponse.from_request
    expect_parameters(failed_response, "request", "sampling_params", "model_name", "created_time", "output", "status")

    def prepare(self: Any, request: Any, context: Any) -> Answer | None:
        if not self.use_harmony or self.tool_server is not None:
            return None
        if not hasattr(context, "npu_gptoss_answer"):
            context.npu_gptoss_answer = Answer(assistant_turn(reading_of(request)), bool(request.stream))
        return context.npu_gptoss_answer

    @around(serving, "_process_harmony_streaming_events")
    async def _process_harmony_streaming_events(
        original, self, request, sampling_params, result_generator, context, *args: Any
    ) -> AsyncIterator[Any]:
        answer = getattr(context, "npu_gptoss_answer", None)
        if answer is None:
            async for event in original(self, request, sampling_params, result_generator, context, *args):
                yield event
            return
        numbered = args[-1]
        async for _ in result_generator:
            for event in answer.new_events():
                yield numbered(event)

    @around(serving, "_make_response_output_items_with_harmony")
    def _make_response_output_items_with_harmony(original, self, context: Any) -> list[Any]:
        answer = getattr(context, "npu_gptoss_answer", None)
        return original(self, context) if answer is None else answer.items()

    @around(serving, "responses_full_generator")
    async def responses_full_generator(
        original, self, request, sampling_params, result_generator, context, *args: Any, **kwargs: Any
    ) -> Any:
        answer = prepare(self, request, context)
        try:
            response = await original(self, request, sampling_params, result_generator, context, *args, **kwargs)
        except ValueError:
            raise  # vLLM answers 400
        except Exception as error:  # and 0.11.0 400 to these too, which are not the client's
            if hasattr(error, "status_code"):
                raise
            log_failure("a response failed", error)
            return self.create_error_response(
                str(error) or type(error).__name__,
                err_type="server_error",
                status_code=HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        if isinstance(response, serving_responses.ResponsesResponse):
            response.error = None  # the specification wants the field
            if answer is not None and response.status == "incomplete" and context.finish_reason == "stop":
                response.status, response.incomplete_details = "completed", None  # the model wrote nothing
        return response

    @around(serving, "responses_stream_generator")
    async def responses_stream_generator(
        original,
        self,
        request,
        sampling_params,
        result_generator,
        context,
        model_name,
        tokenizer,
        request_metadata,
        created_time=None,
    ) -> AsyncIterator[Any]:
        answer = prepare(self, request, context)
        created_time = created_time or int(time.time())
        arguments = (request, sampling_params, result_generator, context, model_name, tokenizer, request_metadata)
        number = 0
        try:
            async for event in original(self, *arguments, created_time):
                number = event.sequence_number + 1
                yield _last_event(event) if event.type == "response.completed" else event
        except Exception as error:
            log_failure("a streamed response failed", error)
            if answer is not None:
                answer.turn.end("error")
            response = failed_response(
                request,
                sampling_params,
                model_name=model_name,
                created_time=created_time,
                output=answer.items() if answer is not None else [],
                status="failed",
                usage=None,
            )
            code = "invalid_prompt" if isinstance(error, ValueError) else "server_error"
            response.error = {"code": code, "message": str(error) or type(error).__name__}
            if request.store:
                async with self.response_store_lock:
                    self.response_store[response.id] = response
            yield _ended(ResponseFailedEvent, "response.failed", number, response)

    @around(serving, "responses_background_stream_generator")
    async def responses_background_stream_generator(original, self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0)  # the task that makes the events has been created, and has to start
        async for event in original(self, *args, **kwargs):
            yield event
            if event.type in LAST_EVENTS:  # vLLM waits for ever unless it is the first of them
                return


def _last_event(event: Any) -> Any:
    """`response.completed` under the name that fits the response's status."""
    response = event.response
    kind, name = ResponseCompletedEvent, event.type
    if response.status == "incomplete":
        kind, name = ResponseIncompleteEvent, "response.incomplete"
    elif response.status in ("cancelled", "failed"):  # there is no event for the first alone
        response.error = ResponseError(code="server_error", message="The server ended the request before its end.")
        kind, name = ResponseFailedEvent, "response.failed"
    return _ended(kind, name, event.sequence_number, response)


def _ended(kind: type, name: str, number: int, response: Any) -> Any:
    """An event of OpenAI's that holds a response of this class, and so tells it as the class does."""
    return _holding(kind, type(response))(type=name, sequence_number=number, response=response)


@functools.cache
def _holding(kind: type, response: type) -> type:
    return create_model(kind.__name__, __base__=kind, response=(response, ...))


@repair("responses-nulls", f"{RESPONSES}:OpenAIServingResponses.create_responses", lines=("0.11",))
def install_nulls(serving_responses: ModuleType) -> None:
    """A request of /v1/responses with parallel_tool_calls, background or truncation null is not answered."""
    serving = serving_responses.OpenAIServingResponses
    expect_parameters(serving.create_responses, "self", "request", "raw_request")
    fields = serving_responses.ResponsesRequest.model_fields
    defaults = {name: fields[name].default for name in ("parallel_tool_calls", "background", "truncation")}

    @around(serving, "create_responses")
    async def create_responses(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
        for name, default in defaults.items():
            if getattr(request, name) is None:
                setattr(request, name, default)
        return await original(self, request, raw_request)


@repair("responses-store", f"{RESPONSES}:OpenAIServingResponses._make_not_found_error", lines=("0.11",))
def install_store(serving_responses: ModuleType) -> None:
    """A response that is not stored is not found, without a word how responses are stored."""
    serving = serving_responses.OpenAIServingResponses
    expect_parameters(serving._make_not_found_error, "self", "response_id")

    @around(serving, "_make_not_found_error")
    def _make_not_found_error(original: Callable[..., Any], self: Any, response_id: str) -> Any:
        answer = original(self, response_id)
        if not self.enable_store:
            answer.error.message += (
                " This server stores no responses. Start it with VLLM_ENABLE_RESPONSES_API_STORE=1 (it then keeps "
                "all of them in memory), or send the earlier items of the conversation as input."
            )
        return answer
