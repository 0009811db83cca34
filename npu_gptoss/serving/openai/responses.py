"""Replaces vLLM's handler of /v1/responses: whole, streamed, and in the background.

vLLM's routes retrieve and cancel from its stores: `response_store` has each response as an object of vLLM's class,
`event_store` the events of a background stream, `background_tasks` the task that makes them. `msg_store` has the
conversation that a request with `previous_response_id` continues.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from npu_gptoss.frontend import responses
from npu_gptoss.frontend.response_items import Conversation
from npu_gptoss.serving.admission.refusal import shown
from npu_gptoss.serving.openai import intake
from npu_gptoss.serving.openai.engine import Started, encoder_of, facts_of, start, use
from npu_gptoss.serving.openai.errors import (
    failed,
    log_failure,
    of_the_request,
    printing,
    refusal,
    refused,
    unknown_model,
)
from npu_gptoss.serving.openai.release import release
from npu_gptoss.serving.releases import vllm as names

INVALID = "invalid_request_error"
STORE_HINT = (
    " This server stores no responses. Start it with VLLM_ENABLE_RESPONSES_API_STORE=1 (it then keeps them in "
    "memory until they are deleted), or send the earlier items of the conversation as input."
)
SERVERS_HINT = (  # without the option there is one for each engine of --data-parallel-size
    " This server has {} API servers, and each keeps its own responses. Start it with --api-server-count 1, or send "
    "the earlier items of the conversation as input."
)
NO_BACKGROUND = (  # vLLM's words
    "This vLLM engine does not support `store=True` and therefore does not support the background mode. To enable "
    "these features, set the environment variable `VLLM_ENABLE_RESPONSES_API_STORE=1` when launching the vLLM server."
)


class Event:
    """An event of a stream, with the attributes that vLLM's routes read."""

    __slots__ = ("body", "sequence_number", "type")

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.body, self.type, self.sequence_number = body, body["type"], body["sequence_number"]

    def model_dump_json(self, **_: Any) -> str:
        return json.dumps(self.body, ensure_ascii=False)


async def create(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Answers a request. `self`: vLLM's serving object. Returns an error, a response or a stream of events."""
    if not intake.is_ours(self):
        return await original(self, request, raw_request)
    if (unknown := await unknown_model(self, intake.written(request, raw_request))) is not None:
        return unknown
    body = intake.body_of(raw_request)
    if body is None:
        body = intake.fields_of(request)
    if (error := _without_output(self, body.get("previous_response_id"))) is not None:
        return error
    try:
        wanted = _read(self, body)
        if wanted.background and not self.enable_store:
            return refused(NO_BACKGROUND, "background", kind=INVALID)
        intake.warn(raw_request, wanted.asked.warnings)
        started = await start(self, wanted.asked, request.request_id, raw_request, stream=wanted.stream)
        wanted = replace(wanted, asked=started.asked)
        answer = responses.Answer(wanted, _facts(started, wanted), started.turn())
    except of_the_request() as error:
        return refusal(error)
    work = _Work(started, answer, raw_request)
    if wanted.background:
        return await work.in_background()
    if wanted.stream:
        return work.events()
    try:
        return await work.whole()
    except Exception as error:
        return failed("a response failed", error)


async def count(self: Any, body: Mapping[str, Any]) -> Any:
    """Returns the JSON of /v1/responses/input_tokens, or vLLM's ErrorResponse."""
    if (error := await unknown_model(self, intake.Written(body))) is not None:
        return error
    if (error := _without_output(self, body.get("previous_response_id"))) is not None:
        return error
    try:
        asked = _read(self, body).asked
        limit = release().max_model_len(self) if asked.truncates else None
        _, tokens = await asyncio.to_thread(asked.fitted, encoder_of(self), limit)
    except of_the_request() as error:
        return refusal(error)
    return {"object": "response.input_tokens", "input_tokens": len(tokens)}


def _read(self: Any, body: Mapping[str, Any]) -> responses.Request:
    def find(name: str) -> Mapping[str, Any] | None:
        """An item of any stored response, by its id."""
        return next((stored.items[name] for stored in self.msg_store.values() if name in stored.items), None)

    previous = self.msg_store.get(body.get("previous_response_id"))
    return responses.read(body, release().defaults(self), previous, find)


def _without_output(self: Any, previous: str | None) -> Any:
    """Returns the error for a previous response that cannot be continued; else None."""
    if previous is None or previous in self.msg_store:
        return None
    if previous not in self.response_store:
        return not_found(self, previous, "previous_response_id")
    status = self.response_store[previous].status
    return refused(
        f"previous_response_id: expected a response with an output, got one that is {status}.", "previous_response_id"
    )


def not_found(self: Any, response_id: str, param: str = "response_id") -> Any:
    """Returns the error for an unknown response, which explains how to store responses."""
    hint = STORE_HINT
    if self.enable_store:
        servers = self.engine_client.vllm_config.parallel_config._api_process_count
        hint = SERVERS_HINT.format(servers) if servers > 1 else ""
    return refused(f"Response with id '{response_id}' not found.{hint}", param, 404, INVALID)


def ended_in_background(self: Any, response_id: str) -> Any:
    """Returns a background response that has ended; else None. To cancel it is no mistake, as with OpenAI's servers."""
    response = self.response_store.get(response_id)
    if response is None or response.status in ("queued", "in_progress"):
        return None
    return response if response.model_dump()["background"] else None


def input_items(self: Any, response_id: str, order: str, limit: int, after: str | None) -> Any:
    """Returns a page of the items that the model read before this response, those of earlier responses too."""
    if (response := self.response_store.get(response_id)) is None or not intake.is_ours(self):
        return not_found(self, response_id)
    items = response.inputs if order == "asc" else dict(reversed(response.inputs.items()))
    if after is not None and after not in items:
        return refused(f"after: expected the id of an item of the response, got {shown(after)}.", "after", kind=INVALID)
    first = 0 if after is None else [*items].index(after) + 1
    page = [*items.values()][first : first + limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return {"object": "list", "data": page, **ends, "has_more": first + limit < len(items)}


def replay(self: Any, response_id: str, starting_after: int | None = None) -> Any:
    """Returns the events of a response that was streamed in the background, or an error if there are none."""
    if response_id in self.event_store:
        return _replayed(self, response_id, starting_after)
    message = f"stream: expected false, got true: response {response_id!r:.80} was not streamed in the background."
    return refused(message, "stream", kind=INVALID)


async def _replayed(self: Any, response_id: str, starting_after: int | None) -> AsyncGenerator[Any, None]:
    """Yields a response's events, including future ones. vLLM's own waits after the last event."""
    events, arrived = self.event_store[response_id]
    number = 0 if starting_after is None else starting_after + 1
    while True:
        arrived.clear()
        while number < len(events):
            yield events[number]
            number += 1
        if response_id not in self.background_tasks:
            return
        await arrived.wait()


def _facts(started: Started, wanted: responses.Request) -> responses.Facts:
    sampled = ("temperature", "top_p", "presence_penalty", "frequency_penalty", "max_tokens")
    return facts_of(
        responses.Facts,
        started,
        stored=wanted.store and started.serving.enable_store,
        sampled={name: getattr(started.params, name) for name in sampled},
        logprobs=started.logprobs if started.plain.logprobs else None,
    )


class _Work:
    """A request in the engine, with the stores of vLLM's serving object."""

    def __init__(self, started: Started, answer: responses.Answer, raw_request: Any) -> None:
        self.serving, self.started, self.answer, self.raw_request = started.serving, started, answer, raw_request
        self.id = started.name

    async def whole(self) -> Any:
        body = await self.answer.whole(self.started.outputs, self.started.step)
        use(self.raw_request, self.answer.counts)
        return await self._keep(body)

    async def events(self) -> AsyncGenerator[Event, None]:
        try:
            async with aclosing(self.answer.stream(self.started.outputs, self.started.step)) as events:
                async for body in events:
                    if body["type"] in responses.LAST_EVENTS:
                        use(self.raw_request, self.answer.counts)
                        await self._keep(body["response"])
                    yield Event(body)
        except Exception as error:
            log_failure("a streamed response failed", error)
            body = self.answer.failed(error)
            await self._keep(body)
            yield Event(self.answer.last(body))

    async def in_background(self) -> Any:
        """Returns the queued response, or the events of a stream that continues after the client has left."""
        serving = self.serving
        queued = await self._keep(self.answer.response("queued"))
        arrived = asyncio.Event()
        if self.answer.request.stream:
            events: deque[Event] = deque()
            serving.event_store[self.id] = (events, arrived)
            work = self._stream(events, arrived)
        else:
            work = self._run()
        task = asyncio.create_task(work, name=f"create_{self.id}")
        serving.background_tasks[self.id] = task

        def done(_: asyncio.Task[None]) -> None:
            serving.background_tasks.pop(self.id, None)
            arrived.set()

        task.add_done_callback(done)
        return _replayed(serving, self.id, None) if self.answer.request.stream else queued

    async def _run(self) -> None:
        await self._keep(self.answer.response("in_progress"))
        try:
            await self.whole()
        except Exception as error:
            log_failure("a response in the background failed", error)
            await self._keep(self.answer.failed(error))

    async def _stream(self, events: deque[Event], arrived: asyncio.Event) -> None:
        await self._keep(self.answer.response("in_progress"))
        try:
            async for event in self.events():
                events.append(event)
                arrived.set()
        except asyncio.CancelledError:
            events.append(Event(self.answer.last(self.answer.ended())))
            raise

    async def _keep(self, body: Mapping[str, Any]) -> Any:
        """Stores the response, if requested, as an object of vLLM's class. A cancelled response stays cancelled."""
        serving = self.serving
        response = printing(names.ResponsesResponse).of(body, id=body["id"], status=body["status"])
        response.__dict__["inputs"] = self.answer.request.history.items
        if not self.answer.facts.stored:
            return response
        async with serving.response_store_lock:
            known = serving.response_store.get(self.id)
            if known is not None and known.status == "cancelled":
                return response
            serving.response_store[self.id] = response
            if body["status"] in ("completed", "incomplete"):
                conversation: Conversation = self.answer.conversation()
                serving.msg_store[self.id] = conversation
        return response
