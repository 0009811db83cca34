"""/v1/responses: reads OpenAI's request, and turns an engine's steps into items and their events.

A streamed item equals the item of the final response: same id, text and status. The events follow OpenAI's
specification and order: `output_item.added`, the events of the parts or arguments, `output_item.done`; at the end
`response.completed`, `.incomplete` if the output was cut off, `.failed` with the reason if generating failed.

Fields of a request that this module does not read go to the engine in `sampling`, under the names of chat completions;
tests/serving/openai/test_ledger.py has every field of every release of vLLM under one of the tables below.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai_harmony import HarmonyError, Message, Role

from npu_gptoss.frontend import sample
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.request import Asked, Defaults, ask, begin, member, reading
from npu_gptoss.frontend.response_items import Conversation, Item, read_input, tools_of, with_preambles
from npu_gptoss.frontend.sample import Sample
from npu_gptoss.frontend.structure import FIELDS as STRUCTURE_FIELDS
from npu_gptoss.frontend.structure import forced_structure, only_structure, structure_of, structure_of_format
from npu_gptoss.frontend.tools import read_tools
from npu_gptoss.frontend.turn import Event, Part, Turn
from npu_gptoss.harmony.conversation import ConversationError, developer_message, expected, said, tool_call
from npu_gptoss.harmony.parser import Kind

Json = dict[str, Any]
LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")
INCLUDED = {ENCODED := "reasoning.encrypted_content", LOGPROBS := "message.output_text.logprobs"}  # known in `include`

# Fields of a request that this module reads. The engine does not see them.
READ = {
    *("input", "instructions", "previous_input_messages", "tools", "tool_choice", "parallel_tool_calls", "text"),
    *("reasoning", "reasoning_effort", "include_reasoning", "chat_template_kwargs", "include", "top_logprobs"),
    *("max_output_tokens", "stop", "include_stop_str_in_output", "enable_response_messages", "truncation"),
    *STRUCTURE_FIELDS,
}
# Fields that the engine samples by, under their names.
PASSED = {
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "logit_bias", "ignore_eos", "min_tokens", "stop_token_ids", "allowed_token_ids"),
    *("bad_words", "skip_special_tokens", "spaces_between_special_tokens", "watermarking", "vllm_xargs"),
    *("priority", "cache_salt", "session_id", "kv_transfer_params", "ec_transfer_params"),
}
# Fields by which the server stores and schedules.
STORED = {"stream", "background", "store", "previous_response_id", "request_id"}
# Fields that change nothing here, as OpenAI or vLLM describes them, or that apply to other models only.
# max_tool_calls counts calls of hosted tools, which this server does not run. The answer repeats some of them.
WITHOUT_EFFECT = {
    *("user", "metadata", "service_tier", "max_tool_calls", "stream_options", "moderation"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier", "client_metadata"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs"),
    *("access_programs", "background_options", "image"),
}
# field -> the reason why it has no effect
LEFT_OUT = {"context_management": "this server compacts no conversation"}
# field -> the expected value
REFUSED = {
    "conversation": "the conversation's items in input, or previous_response_id: this server keeps no conversations",
    "prompt": "instructions and input: this server keeps no prompt templates",
}
_KNOWN = READ | PASSED | STORED | WITHOUT_EFFECT | LEFT_OUT.keys() | REFUSED.keys()


@dataclass(frozen=True)
class Request:
    """A request. body: as the client wrote it, without nulls. history: its conversation without the instructions.

    encoded: reasoning items have `encrypted_content`.
    """

    asked: Asked
    body: Json
    history: Conversation
    stream: bool = False
    background: bool = False
    store: bool = True
    encoded: bool = False
    with_messages: bool = False


def read(
    body: Mapping[str, Any],
    defaults: Defaults | None = None,
    previous: Conversation | None = None,
    find: Callable[[str], Mapping[str, Any] | None] = lambda name: None,
) -> Request:
    """Reads a request of /v1/responses. previous: the stored conversation that it continues. find: a stored item by id.

    Raises ConversationError, which names the field.
    """
    defaults = defaults or Defaults()
    body = {name: value for name, value in body.items() if value is not None}
    body, warnings = begin(body, _KNOWN, REFUSED, LEFT_OUT)
    _check(body)
    reasons = member(body, "reasoning", ("effort",), warnings, "an object with an effort")
    text = member(body, "text", ("format",), warnings, "an object with a format")
    parallel = body.get("parallel_tool_calls") is not False
    given = body.get("input", [])
    tools = read_tools(body.get("tools"), body.get("tool_choice"), parallel=parallel, more=tools_of(given))
    before = previous or Conversation(_harmony_messages(body))
    if given == "" and before.turns and previous is None:
        given = []  # the input comes from the messages
    history = read_input(given, tools, before, warnings, find)
    instructions = body.get("instructions")
    if not history.turns and not instructions:
        raise ConversationError("input: expected at least one item, got an empty list.", "input")
    include = set(body.get("include", ()))
    warnings += [
        f"include {name:.80} has no effect on a response of this server" for name in sorted(include - INCLUDED)
    ]
    asked = ask(
        body,
        defaults,
        warnings,
        efforts=[
            ("reasoning.effort", reasons.get("effort")),
            ("reasoning_effort", body.get("reasoning_effort")),
        ],
        turns=[*([developer_message(instructions)] if instructions else []), *history.turns],
        tools=tools,
        reading=reading(tools, body),
        structure=forced_structure(
            tools,
            only_structure([structure_of_format(text.get("format"), "text.format"), structure_of(body)]),
        ),
        sampling=_sampling(body, include),
        truncates=body.get("truncation") == "auto",
    )
    return Request(
        asked,
        body,
        history,
        stream=bool(body.get("stream")),
        background=bool(body.get("background")),
        store=body.get("store") is not False,
        encoded=ENCODED in include,
        with_messages=bool(body.get("enable_response_messages")),
    )


def _check(body: Mapping[str, Any]) -> None:
    """Raises ConversationError for a field of the wrong type that no other function checks."""
    include = body.get("include", [])
    count = body.get("max_output_tokens", 1)
    checks = {
        "instructions": (isinstance(body.get("instructions", ""), str), "a text"),
        "include": (isinstance(include, list) and all(isinstance(one, str) for one in include), "a list of texts"),
        "max_output_tokens": (count > 0, "a number of tokens from 1"),
        "truncation": (body.get("truncation", "auto") in ("auto", "disabled"), "auto or disabled"),
        "background": (not body.get("background") or body.get("store") is not False, "false where store is false"),
        "previous_input_messages": (
            not (body.get("previous_input_messages") and "previous_response_id" in body),
            "no value together with previous_response_id",
        ),
    }
    for name, (good, wanted) in checks.items():
        if not good:
            raise expected(name, wanted, body[name])


def _sampling(body: Mapping[str, Any], include: set[str]) -> Json:
    sampling = {name: value for name, value in body.items() if name in PASSED}
    if "max_output_tokens" in body:
        sampling["max_completion_tokens"] = body["max_output_tokens"]
    if LOGPROBS in include or body.get("top_logprobs"):
        sampling |= {"logprobs": True, "top_logprobs": body.get("top_logprobs", 0)}
    return sampling


def _harmony_messages(body: Mapping[str, Any]) -> list[Message]:
    """Reads vLLM's `previous_input_messages`: harmony messages, as `enable_response_messages` writes them.

    Drops their system turns, because this request has its own.
    """
    found = []
    for number, given in enumerate(body.get("previous_input_messages", ())):
        try:
            message = Message.from_dict(given)
        except (HarmonyError, ValueError, TypeError, KeyError, AttributeError):
            path = f"previous_input_messages[{number}]"
            raise expected(path, "a message of harmony", given) from None
        if message.author.role is not Role.SYSTEM:
            found.append(message)
    return found


@dataclass(frozen=True)
class Facts(sample.Facts):
    """The server's facts for a response. stored: True if the server keeps it.

    sampled: the engine's values of temperature, top_p, … logprobs: maps the front end's piece, and which of its tokens,
    to OpenAI's form.
    """

    stored: bool = False
    sampled: Json = field(default_factory=dict)
    logprobs: Callable[[Piece, Sequence[int]], list[Json]] | None = None


class Answer(sample.Answer):
    """The answer to a request. After an error of the engine, `last` makes the last event of a stream."""

    def __init__(self, request: Request, facts: Facts, turn: Turn) -> None:
        self.request, self.turn = request, turn
        self.sample = Sample(turn)
        super().__init__([self.sample], facts)
        self._items: dict[int, Item] = {}  # by the number of their part
        self._number = 0  # of the next event
        self._logprobs: list[Json] = []  # of text not yet sent
        self._about = _about(request, facts)

    def items(self) -> list[Json]:
        return [item.json(self.request.encoded) for item in self._items.values()]

    def usage(self) -> Json:
        prompt, made = self.facts.prompt_tokens, self.sample.tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self.cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": made,
            "output_tokens_details": {"reasoning_tokens": self.turn.reasoning_tokens},
            "total_tokens": prompt + made,
        }

    def response(self, status: str) -> Json:
        """Returns the response before it has an output."""
        return self._about | {"status": status}

    def ended(self) -> Json:
        """Returns the response at its end."""
        if self.sample.finish is None:
            self._read_events(self.sample.read(Piece(0, (), "abort")), None)
        status = {"length": "incomplete", "abort": "cancelled", None: "cancelled"}.get(self.sample.finish, "completed")
        response = self._about | {"status": status, "output": self.items(), "usage": self.usage()} | self.extra
        if status == "completed":
            response["completed_at"] = int(time.time())
        elif status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            response["error"] = {"code": "server_error", "message": "The server ended the request before its end."}
        if self.request.with_messages:
            response["input_messages"] = [message.to_dict() for message in self.request.asked.conversation]
            response["output_messages"] = [message.to_dict() for message in self._written()]
        return response

    def failed(self, error: Exception) -> Json:
        """Returns the response after an error ended the generation."""
        self._read_events(self.sample.read(Piece(0, (), "error")), None)
        code = "invalid_prompt" if isinstance(error, ValueError) else "server_error"
        about = {"code": code, "message": str(error) or type(error).__name__}
        return self._about | {"status": "failed", "output": self.items(), "error": about}

    def conversation(self) -> Conversation:
        """Returns the conversation for a request with this response's id as its previous_response_id."""
        history = self.request.history
        names = {item.call_id: item.part.name or "" for item in self._items.values() if item.tool is not None}
        items = {item.id: item.json(self.request.encoded) for item in self._items.values()}
        turns = with_preambles([*history.turns, *self._written()])
        return Conversation(turns, {**history.names, **names}, {**history.items, **items})

    def _written(self) -> list[Message]:
        """Returns the turn as harmony messages, without calls that the client does not see."""
        return [
            tool_call(part.name or "", part.text) if part.kind is Kind.CALL else said(part.text, part.kind.value)
            for part in self.turn.parts
            if part.shown or part.kind is Kind.REASONING
        ]

    def take(self, step: Step) -> None:
        self._read(step, None)

    def begun(self) -> list[Json]:
        response = self.response("in_progress")
        return [self._event(f"response.{name}", response=response) for name in ("created", "in_progress")]

    def events(self, step: Step) -> list[Json]:
        sent: list[Json] = []
        self._read(step, sent)
        return sent

    def end(self) -> list[Json]:
        return [self.last(self.ended())]

    def last(self, response: Json) -> Json:
        """Returns the last event, which has the final response."""
        status = response["status"]
        name = status if status in ("completed", "incomplete") else "failed"  # a cancelled response has no event
        return self._event(f"response.{name}", response=response)

    def _read(self, step: Step, sent: list[Json] | None) -> None:
        """sent: collects the events of a stream; None for a whole answer."""
        for piece in step.pieces:
            if self.facts.logprobs is None:
                self._read_events(self.sample.read(piece), sent)
                continue
            for one in _one_by_one(piece):
                events = self.sample.read(one)
                if self.sample.answer:
                    self._logprobs += self.facts.logprobs(one, self.sample.answer)
                self._read_events(events, sent)
                if self.sample.finish is not None:
                    break

    def _read_events(self, events: Sequence[Event], sent: list[Json] | None) -> None:
        for event in events:
            item = self._item(event.part)
            logprobs: list[Json] = []
            if self._logprobs and event.what != "begun":
                logprobs, self._logprobs = self._logprobs, []
                item.logprobs += logprobs if event.part.kind is Kind.ANSWER else []
            if sent is not None:
                self._send(event, item, logprobs, sent)

    def _item(self, part: Part) -> Item:
        if (item := self._items.get(part.number)) is None:
            tool = self.request.asked.tools.called(part.name or "") if part.kind is Kind.CALL else None
            self._items[part.number] = item = Item.of(part, len(self._items), tool)
        return item

    def _event(self, name: str, /, **fields: Any) -> Json:
        self._number += 1
        return {"type": name, "sequence_number": self._number - 1, **fields}

    def _send(self, event: Event, item: Item, logprobs: list[Json], sent: list[Json]) -> None:
        """Adds the stream's events for an event of the turn."""
        of: Json = {"item_id": item.id, "output_index": item.index}
        place = {"output_index": item.index}
        custom = item.custom
        if item.tool is None:
            of["content_index"] = 0
        if event.what == "begun":
            begun = item.json(self.request.encoded, empty=True)
            sent.append(self._event("response.output_item.added", **place, item=begun))
            if item.tool is None:
                sent.append(self._event("response.content_part.added", **of, part=item.content(empty=True)))
            return
        own = {"logprobs": logprobs} if item.part.kind is Kind.ANSWER else {}
        if event.what == "more":
            if custom or not item.event:  # sent when the call is complete
                return
            last = sent[-1] if sent else {}
            if last.get("item_id") == of["item_id"] and "delta" in last:
                last["delta"] += event.text
                if own:
                    last["logprobs"] = last["logprobs"] + logprobs
            else:
                sent.append(self._event(f"{item.event}.delta", **of, delta=event.text, **own))
            return
        if custom:
            text = item.text
            sent.append(self._event(f"{item.event}.delta", **of, delta=text))
            sent.append(self._event(f"{item.event}.done", **of, input=text))
        elif not item.event:
            pass
        elif item.tool is not None:  # newer clients need the name, older clients ignore it
            sent.append(self._event(f"{item.event}.done", **of, arguments=item.text, name=item.tool.own_name))
        else:
            own = {"logprobs": [*item.logprobs]} if own else {}
            sent.append(self._event(f"{item.event}.done", **of, text=item.text, **own))
            sent.append(self._event("response.content_part.done", **of, part=item.content()))
        sent.append(self._event("response.output_item.done", **place, item=item.json(self.request.encoded)))


def _one_by_one(piece: Piece) -> list[Piece]:
    """Splits a piece by token, so that each log-probability finds the item of its text."""
    last = len(piece.token_ids) - 1
    if last < 1:
        return [piece]
    pieces = []
    for number, token in enumerate(piece.token_ids):
        end = (piece.finish, piece.stop_reason) if number == last else (None, None)
        pieces.append(Piece(piece.index, (token,), *end, (piece.logprobs or ())[number : number + 1]))
    return pieces


def _about(request: Request, facts: Facts) -> Json:
    """Returns the response's constant fields. A field that the client left out has OpenAI's default."""
    body, sampled = request.body, facts.sampled
    about = {
        "id": facts.id,
        "object": "response",
        "created_at": int(time.time()),
        "completed_at": None,
        "status": "in_progress",
        "background": request.background,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": sampled.get("max_tokens", body.get("max_output_tokens")),
        "max_tool_calls": body.get("max_tool_calls"),
        "metadata": body.get("metadata", {}),
        "model": facts.model,
        "output": [],
        "parallel_tool_calls": request.asked.tools.parallel,
        "previous_response_id": body.get("previous_response_id"),
        "prompt": None,
        "prompt_cache_key": body.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None} | body.get("reasoning", {}),
        "safety_identifier": body.get("safety_identifier"),
        "service_tier": body.get("service_tier", "auto"),
        "store": facts.stored,
        "text": {"format": {"type": "text"}} | body.get("text", {}),
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_logprobs": body.get("top_logprobs", 0),
        "truncation": body.get("truncation", "disabled"),
        "usage": None,
        "user": body.get("user"),
    }
    for name, default in (("temperature", 1.0), ("top_p", 1.0), ("presence_penalty", 0.0), ("frequency_penalty", 0.0)):
        about[name] = sampled.get(name, body.get(name, default))
    return about
