"""/v1/responses: the output items of a turn and the events that tell them, from one reading (`turn`).

A streamed item is the item of the final response: same id, same text, same status. The events are those of OpenAI's
specification, in its order: `output_item.added`, the parts' or the arguments' own, `output_item.done`; at the end
`response.completed`, `.incomplete` when the output was cut off, `.failed` with the reason when generating failed.

vLLM 0.11.0 streams no function call at all, gives other ids in the final response, numbers items so that OpenAI's
client fails, does not close an item that is cut off, and ends every stream with `response.completed`.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable
from http import HTTPStatus
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openai.types.responses import (
    ResponseContentPartAddedEvent,
    ResponseContentPartDoneEvent,
    ResponseError,
    ResponseFailedEvent,
    ResponseFunctionCallArgumentsDeltaEvent,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseFunctionToolCall,
    ResponseIncompleteEvent,
    ResponseOutputItemAddedEvent,
    ResponseOutputItemDoneEvent,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseReasoningTextDeltaEvent,
    ResponseReasoningTextDoneEvent,
    ResponseTextDeltaEvent,
    ResponseTextDoneEvent,
)
from openai.types.responses.response_reasoning_item import Content

from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.streaming import log_failure
from npu_gptoss.serving.compat.targets import CONTEXT, RESPONSES
from npu_gptoss.serving.compat.turn import Event, Part, Turn, assistant_turn, reading_of

if TYPE_CHECKING:
    from openai.types.responses import ResponseOutputItem
    from vllm.outputs import RequestOutput

PREFIX = {Kind.REASONING: "rs", Kind.ANSWER: "msg", Kind.CALL: "fc"}  # of an item's id
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


def _output_text(text: str) -> ResponseOutputText:
    return ResponseOutputText(type="output_text", text=text, annotations=[], logprobs=[])


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

    def _item(self, part: Part, empty: bool = False) -> ResponseOutputItem:
        status = {None: "in_progress", True: "completed", False: "incomplete"}[part.complete]
        own = {"id": f"{PREFIX[part.kind]}_{self._ids[part.number]}", "status": status}
        text = "" if empty else part.text
        if part.kind is Kind.CALL:
            call_id = f"call_{self._ids[part.number]}"
            return ResponseFunctionToolCall(
                type="function_call", call_id=call_id, name=part.name, arguments=text, **own
            )
        if part.kind is Kind.ANSWER:
            content = [] if empty else [_output_text(text)]
            return ResponseOutputMessage(type="message", role="assistant", content=content, **own)
        content = [] if empty else [Content(type="reasoning_text", text=text)]
        return ResponseReasoningItem(type="reasoning", summary=[], content=content, **own)

    def _take(self, events: list[Event]) -> None:
        for event in events:
            if event.what == "begun":
                self._ids.append(self._new_id())
            if self._streamed:
                self._events += _TELL[event.part.kind, event.what](self, event.part, event.text)

    def _place(self, part: Part, of_content: bool = True) -> dict[str, Any]:
        place = {"item_id": self._item(part).id, "output_index": part.number, "sequence_number": -1}
        return place | ({"content_index": 0} if of_content else {})

    def _added(self, part: Part) -> ResponseOutputItemAddedEvent:
        return ResponseOutputItemAddedEvent(
            type="response.output_item.added",
            output_index=part.number,
            sequence_number=-1,
            item=self._item(part, empty=True),
        )

    def _done(self, part: Part) -> ResponseOutputItemDoneEvent:
        return ResponseOutputItemDoneEvent(
            type="response.output_item.done", output_index=part.number, sequence_number=-1, item=self._item(part)
        )

    def _content_added(self, part: Part, content: Any) -> ResponseContentPartAddedEvent:
        return ResponseContentPartAddedEvent(type="response.content_part.added", part=content, **self._place(part))

    def _content_done(self, part: Part, content: Any) -> ResponseContentPartDoneEvent:
        return ResponseContentPartDoneEvent(type="response.content_part.done", part=content, **self._place(part))

    def _answer_begun(self, part: Part, _: str) -> list[Any]:
        return [self._added(part), self._content_added(part, _output_text(""))]

    def _answer_more(self, part: Part, text: str) -> list[Any]:
        return [ResponseTextDeltaEvent(type="response.output_text.delta", delta=text, logprobs=[], **self._place(part))]

    def _answer_ended(self, part: Part, _: str) -> list[Any]:
        done = ResponseTextDoneEvent(type="response.output_text.done", text=part.text, logprobs=[], **self._place(part))
        return [done, self._content_done(part, _output_text(part.text)), self._done(part)]

    def _reasoning_begun(self, part: Part, _: str) -> list[Any]:
        return [self._added(part), self._content_added(part, {"type": "reasoning_text", "text": ""})]

    def _reasoning_more(self, part: Part, text: str) -> list[Any]:
        return [ResponseReasoningTextDeltaEvent(type="response.reasoning_text.delta", delta=text, **self._place(part))]

    def _reasoning_ended(self, part: Part, _: str) -> list[Any]:
        done = ResponseReasoningTextDoneEvent(type="response.reasoning_text.done", text=part.text, **self._place(part))
        content = {"type": "reasoning_text", "text": part.text}  # each event has a class of its own for it
        return [done, self._content_done(part, content), self._done(part)]

    def _call_begun(self, part: Part, _: str) -> list[Any]:
        return [self._added(part)]

    def _call_more(self, part: Part, text: str) -> list[Any]:
        place = self._place(part, of_content=False)
        return [
            ResponseFunctionCallArgumentsDeltaEvent(type="response.function_call_arguments.delta", delta=text, **place)
        ]

    def _call_ended(self, part: Part, _: str) -> list[Any]:
        done = ResponseFunctionCallArgumentsDoneEvent(
            type="response.function_call_arguments.done",
            arguments=part.text,
            name=part.name,  # newer clients want it, older ones leave it aside
            **self._place(part, of_content=False),
        )
        return [done, self._done(part)]


_TELL: dict[tuple[Kind, str], Callable[[Answer, Part, str], list[Any]]] = {
    (Kind.ANSWER, "begun"): Answer._answer_begun,
    (Kind.ANSWER, "more"): Answer._answer_more,
    (Kind.ANSWER, "ended"): Answer._answer_ended,
    (Kind.REASONING, "begun"): Answer._reasoning_begun,
    (Kind.REASONING, "more"): Answer._reasoning_more,
    (Kind.REASONING, "ended"): Answer._reasoning_ended,
    (Kind.CALL, "begun"): Answer._call_begun,
    (Kind.CALL, "more"): Answer._call_more,
    (Kind.CALL, "ended"): Answer._call_ended,
}


@repair(
    "responses-outputs",
    f"{CONTEXT}:HarmonyContext.append_output StreamingHarmonyContext.append_output",
    lines=("0.11",),
)
def install_answers(context: ModuleType) -> None:
    """The contexts of /v1/responses do not hand their outputs to the reading that responses-items uses."""
    for kind in (context.HarmonyContext, context.StreamingHarmonyContext):
        original = kind.append_output
        expect_parameters(original, "self", "output")
        replace(kind, "append_output", _showing(original))


def _showing(original: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    @functools.wraps(original)
    def append_output(self: Any, output: Any) -> None:
        original(self, output)
        answer = getattr(self, "npu_gptoss_answer", None)
        if answer is not None and not isinstance(output, list):
            answer.read(output)

    return append_output


@repair(
    "responses-items",
    f"{RESPONSES}:OpenAIServingResponses._process_harmony_streaming_events ._make_response_output_items_with_harmony",
    f"{RESPONSES}:OpenAIServingResponses.responses_full_generator .responses_stream_generator",
    f"{RESPONSES}:OpenAIServingResponses.responses_background_stream_generator",
    lines=("0.11",),
    upstream="vllm issues 23222 and 45742, PRs 24317, 29947 and 45745",
)
def install_items(serving_responses: ModuleType) -> None:
    """A streamed response has no function call, other ids than the final one, items numbered so that OpenAI's
    client fails, and not closed when they are cut off, and ends with response.completed in any case."""
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

    @functools.wraps(events)
    async def _process_harmony_streaming_events(
        self, request, sampling_params, result_generator, context, *args: Any
    ) -> AsyncIterator[Any]:
        answer = getattr(context, "npu_gptoss_answer", None)
        if answer is None:
            async for event in events(self, request, sampling_params, result_generator, context, *args):
                yield event
            return
        numbered = args[-1]
        async for _ in result_generator:
            for event in answer.new_events():
                yield numbered(event)

    @functools.wraps(items)
    def _make_response_output_items_with_harmony(self, context: Any) -> list[Any]:
        answer = getattr(context, "npu_gptoss_answer", None)
        return items(self, context) if answer is None else answer.items()

    @functools.wraps(whole)
    async def responses_full_generator(
        self, request, sampling_params, result_generator, context, *args: Any, **kwargs: Any
    ) -> Any:
        answer = prepare(self, request, context)
        try:
            response = await whole(self, request, sampling_params, result_generator, context, *args, **kwargs)
        except ValueError:
            raise  # vLLM answers 400
        except Exception as error:  # and 400 to these too, which are not the client's
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

    @functools.wraps(stream)
    async def responses_stream_generator(
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
            async for event in stream(self, *arguments, created_time):
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
            yield ResponseFailedEvent(type="response.failed", sequence_number=number, response=response.model_dump())

    @functools.wraps(background)
    async def responses_background_stream_generator(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(0)  # the task that makes the events has been created, and has to start
        async for event in background(self, *args, **kwargs):
            yield event
            if event.type in LAST_EVENTS:  # vLLM waits for ever unless it is the first of them
                return

    for function in (
        _process_harmony_streaming_events,
        _make_response_output_items_with_harmony,
        responses_full_generator,
        responses_stream_generator,
        responses_background_stream_generator,
    ):
        replace(serving, function.__name__, function)


def _last_event(event: Any) -> Any:
    """`response.completed` under the name that fits the response's status."""
    response = event.response
    if response.status == "incomplete":
        return ResponseIncompleteEvent(
            type="response.incomplete", sequence_number=event.sequence_number, response=response
        )
    if response.status in ("cancelled", "failed"):  # there is no event for the first alone
        response.error = ResponseError(code="server_error", message="The server ended the request before its end.")
        return ResponseFailedEvent(type="response.failed", sequence_number=event.sequence_number, response=response)
    return event


@repair("responses-nulls", f"{RESPONSES}:OpenAIServingResponses.create_responses", lines=("0.11",))
def install_nulls(serving_responses: ModuleType) -> None:
    """A request of /v1/responses with parallel_tool_calls, background or truncation null is not answered."""
    serving = serving_responses.OpenAIServingResponses
    original = serving.create_responses
    expect_parameters(original, "self", "request", "raw_request")
    fields = serving_responses.ResponsesRequest.model_fields
    defaults = {name: fields[name].default for name in ("parallel_tool_calls", "background", "truncation")}

    @functools.wraps(original)
    async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
        for name, default in defaults.items():
            if getattr(request, name) is None:
                setattr(request, name, default)
        return await original(self, request, raw_request)

    replace(serving, "create_responses", create_responses)


@repair("responses-store", f"{RESPONSES}:OpenAIServingResponses._make_not_found_error", lines=("0.11",))
def install_store(serving_responses: ModuleType) -> None:
    """A response that is not stored is not found, without a word how responses are stored."""
    serving = serving_responses.OpenAIServingResponses
    original = serving._make_not_found_error
    expect_parameters(original, "self", "response_id")

    @functools.wraps(original)
    def _make_not_found_error(self, response_id: str) -> Any:
        answer = original(self, response_id)
        if not self.enable_store:
            answer.error.message += (
                " This server stores no responses. Start it with VLLM_ENABLE_RESPONSES_API_STORE=1 (it then keeps "
                "all of them in memory), or send the earlier items of the conversation as input."
            )
        return answer

    replace(serving, "_make_not_found_error", _make_not_found_error)
