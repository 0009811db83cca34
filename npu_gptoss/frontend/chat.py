"""Chat completions: reads OpenAI's request, and turns an engine's steps into chunks or one answer.

`Choice` writes streams and whole answers alike. Reasoning has both names that clients look for. Fields that this module
does not read go to the engine in `sampling`; tests/serving/openai/test_ledger.py has every field of every release of
vLLM under one of the tables below.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_gptoss.frontend import sample
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.request import Asked, Defaults, ask, begin, member, reading
from npu_gptoss.frontend.sample import Sample, new_id
from npu_gptoss.frontend.structure import FIELDS as STRUCTURE_FIELDS
from npu_gptoss.frontend.structure import forced_structure, structure_of
from npu_gptoss.frontend.tools import Tool, custom_input, read_tools, readable
from npu_gptoss.frontend.turn import Event, Part, Turn
from npu_gptoss.harmony.conversation import (
    ConversationError,
    as_text,
    chat_message,
    expected,
    fields_of,
    reasoning_of,
    sequence,
)
from npu_gptoss.harmony.parser import Kind

Json = dict[str, Any]
quoted: Callable[[str], str] = json.encoder.encode_basestring  # as json.dumps writes a text with ensure_ascii=False
_PLAIN_END = '}, "logprobs": null, "finish_reason": null}]}\n\n'
NAMES = ("reasoning_content", "reasoning")  # clients look for either

# Fields of a request that this module reads. The engine does not see them.
READ = {
    *("messages", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call", *STRUCTURE_FIELDS),
    *("stop", "include_stop_str_in_output", "stream_options", "include_reasoning", "echo"),
    *("reasoning_effort", "reasoning", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    "modalities",
}
# Fields that the engine samples, schedules or reports by.
PASSED = {
    *("model", "stream", "n", "seed", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "best_of"),
    *("presence_penalty", "repetition_penalty", "length_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("logprob_token_ids", "prompt_logprobs", "max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos"),
    *("stop_token_ids", "allowed_token_ids", "bad_words", "skip_special_tokens", "spaces_between_special_tokens"),
    *("thinking_token_budget", "repetition_detection", "watermarking", "routed_experts_prompt_start"),
    *("request_id", "session_id", "priority", "cache_salt", "kv_transfer_params", "ec_transfer_params"),
    *("vllm_xargs", "return_tokens_as_token_ids", "return_token_ids", "return_weight_versions", "stream_interval"),
    *("return_prompt_text",),
}
# Fields that change nothing here, as OpenAI or vLLM describes them, or that apply to other models only.
WITHOUT_EFFECT = {
    *("user", "metadata", "service_tier", "prediction", "moderation", "add_special_tokens"),
    *("prompt_cache_key", "prompt_cache_retention", "prompt_cache_options", "safety_identifier"),
    *("media_io_kwargs", "mm_processor_kwargs", "mm_payload", "return_mm_kwargs", "return_token_offsets"),
    *("guided_decoding_backend", "early_stopping"),  # no effect in vLLM 0.11; for beam search
    "chat_template",  # admission refuses it unless the server trusts its clients; gpt-oss has a fixed format
}
# field -> the reason why it has no effect
LEFT_OUT = {"verbosity": "gpt-oss has no such setting", "store": "this server keeps no chats"}
# field -> the expected value
REFUSED = {
    "audio": "no audio: gpt-oss writes text",
    "web_search_options": "no web search: this server has none",
    "documents": "the documents' text in messages",
    "truncate_prompt_tokens": "a conversation that fits: harmony's messages are not cut",
    "logits_processors": "fields by which vLLM samples: this server runs no code of a request",
    "truncation_side": "a conversation that fits: harmony's messages are not cut",
}
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")  # the last has no effect
BEAM_SEARCH = "use_beam_search"  # the engine's own server handles it


@dataclass(frozen=True)
class Request:
    """A chat. deprecated: an answer's call is in `function_call`."""

    asked: Asked
    n: int = 1
    stream: bool = False
    usage: bool = False
    running_usage: bool = False
    with_token_ids: bool = False
    deprecated: bool = False
    echo: str = ""


NO_DEFAULTS = Defaults()


def read(body: Mapping[str, Any], defaults: Defaults = NO_DEFAULTS) -> Request:
    """Reads a request of /v1/chat/completions. Raises ConversationError, which names the field."""
    body, warnings = begin(body, _KNOWN, REFUSED, LEFT_OUT)
    if body.get("modalities") not in (None, [], ["text"]):
        raise expected("modalities", "text, which is all that gpt-oss writes", body["modalities"])
    if not sequence(body.get("messages"), "messages"):
        raise expected("messages", "a list of at least one message", body.get("messages"))
    sequence(body.get("functions"), "functions")
    reasons = member(body, "reasoning", ("effort", "exclude"), warnings, "an object with an effort")  # OpenRouter's
    deprecated = body.get("functions") is not None and body.get("tools") is None
    given, choice, parallel = body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls")
    if deprecated:
        given, choice = [{"type": "function", "function": one} for one in body["functions"]], body.get("function_call")
        choice = {"type": "function", "function": choice} if isinstance(choice, Mapping) else choice
    else:
        ignored = [name for name in ("functions", "function_call") if body.get(name)]
        warnings += [f"{name} has no effect without functions, or with tools" for name in ignored]
    tools = read_tools(given, choice, parallel=parallel is not False and not deprecated)
    messages, last = body["messages"], fields_of(body["messages"][-1])
    continued = _continued(body, messages)
    turns, names = [], {}
    for number, message in enumerate(messages if continued is None else messages[:-1]):
        turns += chat_message(f"messages[{number}]", _readable(message, f"messages[{number}]", warnings), names)
    if continued is not None and continued[0] == "final":
        turns += chat_message(f"messages[{len(messages) - 1}]", {**last, "content": None}, names)
    options = member(body, "stream_options", STREAM_OPTIONS, warnings)
    usage = bool(defaults.with_usage or options.get("include_usage"))
    asked = ask(
        body,
        defaults,
        warnings,
        efforts=[("reasoning_effort", body.get("reasoning_effort")), ("reasoning.effort", reasons.get("effort"))],
        continued=continued,
        turns=turns,
        tools=tools,
        reading=reading(tools, body | ({"include_reasoning": False} if reasons.get("exclude") else {})),
        structure=forced_structure(tools, structure_of(body)),
        sampling=_sampling(body),
    )
    return Request(
        asked,
        n=body.get("n") or 1,
        stream=bool(body.get("stream")),
        usage=usage,
        running_usage=bool(usage and options.get("continuous_usage_stats")),
        with_token_ids=bool(body.get("return_token_ids")),
        deprecated=deprecated,
        echo=as_text(last.get("content")) if body.get("echo") and last.get("role") == "assistant" else "",
    )


_KNOWN = READ | PASSED | WITHOUT_EFFECT | LEFT_OUT.keys() | REFUSED.keys() | {BEAM_SEARCH}


def _readable(message: Any, place: str, warnings: list[str]) -> Any:
    """Returns a message, with sentences in a tool's result for parts that are no text. Adds to warnings."""
    fields = fields_of(message)
    if fields.get("role") in ("tool", "function"):
        return {**fields, "content": readable(fields.get("content"), f"{place}.content", warnings)}
    if fields.get("name"):
        warnings.append(f"{place}.name has no effect: gpt-oss reads no names of speakers")
    return message


def _sampling(body: Mapping[str, Any]) -> Json:
    sampling = {name: value for name, value in body.items() if name in PASSED and value is not None}
    if sampling.get("logprobs"):
        sampling.setdefault("top_logprobs", 0)  # the tokens' own, without others
    return sampling


def _continued(body: Mapping[str, Any], messages: Sequence[Any]) -> tuple[str, str] | None:
    """Returns channel and text of the last message if the model is to continue it."""
    if not body.get("continue_final_message"):
        if body.get("add_generation_prompt") is False:
            raise ConversationError(
                "add_generation_prompt: expected true, got false: gpt-oss begins a message of its own unless "
                "continue_final_message is true.",
                "add_generation_prompt",
            )
        return None
    place = f"messages[{len(messages) - 1}]"
    if body.get("add_generation_prompt"):
        raise ConversationError(
            "continue_final_message: expected add_generation_prompt to be false, got both true.",
            "continue_final_message",
        )
    last = fields_of(messages[-1])
    if last.get("role") != "assistant" or last.get("tool_calls"):
        raise ConversationError(
            f"{place}: continue_final_message expects a message of the assistant without calls, got one of "
            f"{last.get('role')!r:.80}.",
            place,
        )
    content = as_text(last.get("content"), f"{place}.content")
    reasoning = reasoning_of(last, place)
    return ("analysis", reasoning) if reasoning and not content else ("final", content)


@dataclass(frozen=True)
class Facts(sample.Facts):
    """The server's facts for a chat.

    role: of the message. fingerprint: of the system. prompt: fields about the prompt, of the first chunk and of a whole
    answer. logprobs: maps the front end's piece, and which of its tokens, to OpenAI's form.
    """

    role: str = "assistant"
    fingerprint: str | None = None
    prompt: Json = field(default_factory=dict)
    logprobs: Callable[[Piece, Sequence[int]], Json] | None = None


class Choice:
    """One sample, and the parts of it that the client has received."""

    def __init__(self, request: Request, turn: Turn, index: int = 0) -> None:
        self.sample = Sample(turn)
        self.turn = turn
        self._index = index
        self.logprobs: list[Json] = []
        self.token_ids: list[int] = []
        self.extra: Json = {}
        self._request = request
        self._tools = request.asked.tools
        self._sent: dict[Kind, int] = {}  # kind -> its last part that has text
        self._last: Part | None = None  # the last part that was sent as text

    @property
    def finish_reason(self) -> str | None:
        if self.sample.finish is not None and self.turn.called:
            return "function_call" if self._request.deprecated else "tool_calls"
        return self.sample.finish

    def delta(self, events: Sequence[Event]) -> Json:
        """Returns the message's additions from these events."""
        calls: list[Json] = []
        texts: dict[Kind, str] = {}
        for event in events:
            part = event.part
            if part.kind is Kind.CALL:
                self._add_call(event, calls)
            elif event.what == "more":
                new_line = "\n" if self._sent.get(part.kind, part.number) != part.number else ""
                texts[part.kind] = texts.get(part.kind, "") + new_line + event.text
                self._sent[part.kind] = part.number
                self._last = part
        delta: Json = {}
        if Kind.ANSWER in texts:
            delta["content"] = texts[Kind.ANSWER]
        if Kind.REASONING in texts:
            delta |= dict.fromkeys(NAMES, texts[Kind.REASONING])
        if calls and self._request.deprecated:
            delta["function_call"] = calls[0]["function"]
        elif calls:
            delta["tool_calls"] = calls
        return delta

    def more(self, event: Event) -> str | None:
        """Returns the beginning of a chunk that continues the text sent last; None for any other event."""
        if event.part is not self._last or event.what != "more":
            return None
        text = quoted(event.text)
        if event.part.kind is Kind.ANSWER:
            return f'{{"index": {self._index}, "delta": {{"content": {text}'
        return f'{{"index": {self._index}, "delta": {{"reasoning_content": {text}, "reasoning": {text}'

    def _add_call(self, event: Event, calls: list[Json]) -> None:
        """Adds to the last entry of the same call: some clients read only the first entry."""
        part = event.part
        number = next(i for i, call in enumerate(self.turn.calls) if call is part)
        tool = self._tools.called(part.name or "")
        if event.what == "begun":
            calls.append({"index": number, "id": new_id("call")} | _call(tool, ""))
        if event.what != ("ended" if tool.kind == "custom" else "more"):
            return
        text = custom_input(part.text) if tool.kind == "custom" else event.text
        if not calls or calls[-1]["index"] != number:
            calls.append({"index": number, tool.kind: {_TEXT[tool.kind]: ""}})
        calls[-1][tool.kind][_TEXT[tool.kind]] += text

    def message(self) -> Json:
        """Returns the whole message."""
        content = self.turn.texts(Kind.ANSWER)
        reasoning = self.turn.texts(Kind.REASONING)
        calls = []
        for part in filter(lambda call: call.shown, self.turn.calls):
            tool = self._tools.called(part.name or "")
            text = custom_input(part.text) if tool.kind == "custom" else part.text
            calls.append({"id": new_id("call")} | _call(tool, text))
        message: Json = {"role": "assistant", "content": self._request.echo + (content or "") or content}
        message |= {"refusal": None, "annotations": None, "audio": None, "function_call": None, "tool_calls": calls}
        if self._request.deprecated and calls:
            message |= {"function_call": calls[0]["function"], "tool_calls": []}
        return message | dict.fromkeys(NAMES, reasoning)


_TEXT = {"function": "arguments", "custom": "input"}  # of a call's object


def _call(tool: Tool, text: str) -> Json:
    return {"type": tool.kind, tool.kind: {"name": tool.own_name, _TEXT[tool.kind]: text}}


class Answer(sample.Answer):
    """The answer to a chat. A stream's events are its lines, without the end (`data: [DONE]`)."""

    def __init__(self, request: Request, facts: Facts, new_turn: Callable[[], Turn]) -> None:
        self.request = request
        self.choices = [Choice(request, new_turn(), index) for index in range(request.n)]
        super().__init__([choice.sample for choice in self.choices], facts)
        self._created = int(time.time())
        self._opened = False
        head = {"id": facts.id, "object": "chat.completion.chunk", "created": self._created, "model": facts.model}
        self._head = f'data: {json.dumps(head)[:-1]}, "choices": ['
        about_tokens = facts.logprobs is not None or request.with_token_ids or facts.log is not None
        self._plain = not (about_tokens or request.running_usage)  # chunks of text carry no other fields

    def usage(self, of: Sequence[Sample] | None = None) -> Json:
        """Returns token counts of all samples, or of these."""
        samples = self.samples if of is None else of
        made, prompt = sum(sample.tokens for sample in samples), self.facts.prompt_tokens
        thought = sum(sample.turn.reasoning_tokens for sample in samples)
        usage: Json = {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        known = of is None and self.facts.cached_details and self.cached_tokens
        usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens} if known else None
        return usage | {"completion_tokens_details": {"reasoning_tokens": thought}}

    def take(self, step: Step) -> None:
        for piece in step.pieces:
            choice = self.choices[piece.index]
            if choice.sample.finish is None:
                choice.sample.read(piece)
                self._collect(choice, piece)

    def ended(self) -> Json:
        """Returns the whole answer."""
        choices = []
        for index, choice in enumerate(self.choices):
            logprobs = {"content": choice.logprobs} if self.facts.logprobs is not None else None
            message = choice.message() | {"role": self.facts.role}
            own = {"index": index, "message": message, "logprobs": logprobs}
            own |= {"finish_reason": choice.finish_reason, "stop_reason": choice.sample.stop_reason}
            own |= {"token_ids": choice.token_ids if self.request.with_token_ids else None}
            choices.append(own | choice.extra)
        facts = self.facts
        answer = {"id": facts.id, "object": "chat.completion", "created": self._created, "model": facts.model}
        answer |= {"choices": choices, "service_tier": None, "system_fingerprint": facts.fingerprint}
        answer |= {"usage": self.usage(), "prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None}
        return answer | facts.prompt | self.extra

    def _collect(self, choice: Choice, piece: Piece) -> None:
        choice.extra.update(piece.extra or {})
        if self.request.with_token_ids:
            choice.token_ids += piece.token_ids
        if self.facts.logprobs is not None:
            choice.logprobs += self.facts.logprobs(piece, choice.sample.answer)["content"]

    def events(self, step: Step) -> list[str]:
        lines = [] if self._opened else self._opening()
        self._opened = True
        for piece in step.pieces:
            choice = self.choices[piece.index]
            if choice.sample.finish is None and (line := self._line(choice, piece)) is not None:
                lines.append(line)
        return lines

    def end(self) -> list[str]:
        usage = {name: value for name, value in self.usage().items() if value is not None}
        return [self._written("", {"usage": usage} | self._signed())] if self.request.usage else []

    def _opening(self) -> list[str]:
        running = {"usage": self.usage([])} if self.request.running_usage else {}
        lines = []
        for index in range(self.request.n):
            # null, as OpenAI opens a call: pydantic-ai 1 would take an empty text for the whole answer
            delta = {"role": self.facts.role, "content": None}
            lines.append(self._written(_choice(index, delta), self.facts.prompt | running))
            if self.request.echo:
                lines.append(self._written(_choice(index, {"content": self.request.echo}), running))
        return lines

    def _line(self, choice: Choice, piece: Piece) -> str | None:
        """Returns the chunk of a piece; None if it adds nothing for the client.

        Behind the turn, where only ignore_eos makes the model go on, chunks without text show that it does.
        """
        request, sample = self.request, choice.sample
        events = sample.read(piece)
        if self._plain and len(events) == 1 and sample.finish is None and (text := choice.more(events[0])) is not None:
            return f"{self._head}{text}{_PLAIN_END}"  # nearly all chunks of a stream
        delta = choice.delta(events) if events else {}
        about: Json = {}
        if self.facts.logprobs is not None and sample.answer:
            about["logprobs"] = self.facts.logprobs(piece, sample.answer)
        if request.with_token_ids and piece.token_ids:
            about["token_ids"] = list(piece.token_ids)
        if not delta and not about and sample.finish is None and not choice.turn.parser.over:
            return None
        tail: Json = {"usage": self.usage([sample])} if request.running_usage else {}
        if sample.finish is not None:
            about |= {"finish_reason": choice.finish_reason, "stop_reason": sample.stop_reason, **(piece.extra or {})}
            tail |= self.extra if request.n == 1 else {}
            tail |= {} if request.usage else self._signed()
        if self.facts.log is not None:
            self.facts.log(_logged(delta), piece.token_ids, sample.finish)
        return self._written(_choice(piece.index, delta, about), tail)

    def _written(self, choice: str, tail: Json) -> str:
        end = f", {json.dumps(tail, ensure_ascii=False)[1:]}" if tail else "}"
        return f"{self._head}{choice}]{end}\n\n"

    def _signed(self) -> Json:
        return {"system_fingerprint": self.facts.fingerprint} if self.facts.fingerprint else {}


def _choice(index: int, delta: Json, about: Json | None = None) -> str:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
    return json.dumps(choice | about if about else choice, ensure_ascii=False)


def _logged(delta: Json) -> str:
    calls = "".join(call.get("function", {}).get("arguments", "") for call in delta.get("tool_calls", ()))
    return delta.get("content") or delta.get("reasoning") or calls
