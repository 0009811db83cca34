"""Anthropic's messages: reads a request of /v1/messages, and turns an engine's steps into its answer.

The front end does not read Anthropic's headers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_gptoss.frontend import sample
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.message_blocks import conversation
from npu_gptoss.frontend.message_output import Blocks, line_of
from npu_gptoss.frontend.message_tools import tools_of
from npu_gptoss.frontend.request import Asked, Defaults, ask, begin, member, reading
from npu_gptoss.frontend.sample import Facts, Sample
from npu_gptoss.frontend.structure import Structure, forced_structure, structure_of_format
from npu_gptoss.frontend.turn import Turn
from npu_gptoss.harmony.conversation import expected, sequence
from npu_gptoss.harmony.encoding import ContextError

Json = dict[str, Any]

# Fields of a request that this module reads. The engine does not see them.
READ = {
    *("messages", "system", "tools", "tool_choice", "thinking", "output_config", "output_format", "stop_sequences"),
    "chat_template_kwargs",
}
# Fields that the engine samples, schedules or reports by, named as in chat completions.
PASSED = {
    *("model", "stream", "max_tokens", "temperature", "top_p", "top_k", "watermarking", "request_id", "session_id"),
    *("priority", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"),
}
# Fields that change nothing here, as Anthropic or vLLM describes them.
WITHOUT_EFFECT = {
    *("metadata", "service_tier", "container", "cache_control", "betas", "anthropic_beta"),
    *("anthropic_version", "inference_geo", "speed", "diagnostics", "billing_policy", "user_profile_id"),
    *("workspace_id", "fallbacks", "fallback_credit_token", "mm_payload", "return_mm_kwargs"),
    *("media_io_kwargs", "mm_processor_kwargs"),
}
# field -> the reason why it has no effect
LEFT_OUT = {
    "mcp_servers": "this server calls no MCP server",
    "context_management": "this server edits no conversation",
}
# field -> the expected value
REFUSED = {
    "compaction": "a conversation to answer: this server writes no summaries",
    "thread": "the whole conversation in messages: this server keeps no threads",
    "truncate_prompt_tokens": "a conversation that fits: harmony's messages are not cut",
}
_KNOWN = READ | PASSED | WITHOUT_EFFECT | LEFT_OUT.keys() | REFUSED.keys()

THINKING_OFF = "thinking: disabled"  # counts as an effort: gpt-oss always reasons
EFFORTS = {THINKING_OFF: "low"}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
# HTTP status -> type of an error
ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_type(status: int) -> str:
    return ERROR_TYPES.get(int(status), "api_error" if status >= 500 else "invalid_request_error")


def error_body(message: str, status: int) -> Json:
    """Returns an error in Anthropic's form."""
    return {"type": "error", "error": {"type": error_type(status), "message": message}}


# From these details Anthropic's SDK (2.14) learns that its tool runner must send each conversation whole.
THREADS_REFUSED = error_body(f"thread: expected {REFUSED['thread']}.", 400)
THREADS_REFUSED["error"]["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


def error_event(message: str, status: int) -> str:
    """Returns an error event that ends a stream."""
    return f"event: error\ndata: {json.dumps(error_body(message, status))}\n\n"


def context_words(error: ContextError) -> str:
    """Writes it in Anthropic's words: Claude Code then compacts the conversation or lowers max_tokens."""
    text = str(error)
    limit, *numbers = re.findall(r"\d+", text)
    if len(numbers) == 1:
        return f"prompt is too long: {numbers[0]} tokens > {limit} maximum. {text}"
    _, prompt, wanted = numbers
    return (
        f"input length and `max_tokens` exceed context limit: {prompt} + {wanted} > {limit}, decrease input length or "
        "`max_tokens` and try again"
    )


@dataclass(frozen=True)
class Request:
    """A request of messages."""

    asked: Asked
    stream: bool = False


_DEFAULTS = Defaults()


def read(body: Mapping[str, Any], defaults: Defaults = _DEFAULTS, *, counting: bool = False) -> Request:
    """Reads a request of /v1/messages, or with `counting` of its count_tokens.

    Raises ConversationError, which names the field.
    """
    body, warnings = begin(body, _KNOWN, REFUSED, LEFT_OUT)
    if not sequence(body.get("messages"), "messages"):
        raise expected("messages", "a list of at least one message", body.get("messages"))
    most = body.get("max_tokens")
    if not counting and (most is None or most < 1):
        raise expected("max_tokens", "a number from 1", most)
    with_reasoning = _with_reasoning(body.get("thinking"), warnings)
    efforts = EFFORTS | dict(defaults.efforts)
    defaults = replace(defaults, efforts=efforts, effort=defaults.effort if with_reasoning else THINKING_OFF)
    config = member(body, "output_config", ("effort", "format"), warnings)
    tools = tools_of(body, warnings)
    turns, continued = conversation(body, warnings)
    asked = ask(
        body,
        defaults,
        warnings,
        efforts=[("output_config.effort", config.get("effort"))],
        continued=continued,
        turns=turns,
        tools=tools,
        reading=reading(tools, {"stop": _stop_sequences(body), "include_reasoning": with_reasoning}),
        structure=forced_structure(tools, _structure(body, config)),
        sampling={name: value for name, value in body.items() if name in PASSED and value is not None},
        whole=True,  # Claude Code asks for less then
    )
    return Request(asked, bool(body.get("stream")))


def _with_reasoning(given: Any, warnings: list[str]) -> bool:
    if given is None:
        return True
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind not in THINKING:
        raise expected("thinking.type", ", ".join(THINKING), kind or given)
    if given.get("budget_tokens") is not None:
        warnings.append("thinking.budget_tokens has no effect: output_config.effort sets how much gpt-oss thinks")
    if given.get("display") == "omitted":
        warnings.append(
            "thinking.display has no effect: thinking is sent, because clients must send it back with calls"
        )
    return kind != "disabled"


def _structure(body: Mapping[str, Any], config: Mapping[str, Any]) -> Structure:
    if config.get("format") is None:
        return structure_of_format(body.get("output_format"), "output_format")  # an older beta's field
    return structure_of_format(config["format"], "output_config.format")


def _stop_sequences(body: Mapping[str, Any]) -> Sequence[str]:
    given = sequence(body.get("stop_sequences"), "stop_sequences", "a list of texts")
    if not all(isinstance(stop, str) for stop in given):
        raise expected("stop_sequences", "a list of texts", given)
    return given


class Answer(sample.Answer):
    """The answer to a request of messages. A stream sends the events of a step together."""

    def __init__(self, request: Request, facts: Facts, new_turn: Callable[[], Turn]) -> None:
        self.request = request
        self.sample = Sample(new_turn())
        super().__init__([self.sample], facts)
        self._blocks = Blocks()
        self._opened = False

    @property
    def usage(self) -> Json:
        """Returns token counts. Anthropic does not count cached tokens as input."""
        cached = (self.cached_tokens if self.facts.cached_details else None) or 0
        usage: Json = {"input_tokens": self.facts.prompt_tokens - cached, "output_tokens": self.sample.tokens}
        usage |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return usage | {"output_tokens_details": {"thinking_tokens": self.sample.turn.reasoning_tokens}}

    @property
    def stop(self) -> Json:
        """Returns the stop reason. A call that was cut off must not run: only complete calls give tool_use."""
        sample, stopped = self.sample, self.sample.turn.stopped
        if sample.finish is None:
            return {"stop_reason": None, "stop_sequence": None}
        if sample.turn.called:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if stopped is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": stopped}
        # Anthropic has no name for an engine's other reasons ("repetition"), which cut an answer off, too
        return {"stop_reason": "end_turn" if sample.finish == "stop" else "max_tokens", "stop_sequence": None}

    def take(self, step: Step) -> None:
        for piece in step.pieces:
            if self.sample.finish is None:
                self._blocks.read(self.sample.read(piece))

    def ended(self) -> Json:
        """Returns the whole answer."""
        self._blocks.end()
        return self._message([block.shown() for block in self._blocks.all]) | self.extra

    def events(self, step: Step) -> list[str]:
        lines = self._opening()
        for piece in step.pieces:
            lines += self._lines(piece)
        return ["".join(lines)] if lines else []

    def end(self) -> list[str]:
        last = line_of("message_delta", delta=self.stop, usage=self.usage, **self.extra) + line_of("message_stop")
        return ["".join([*self._opening(), *self._blocks.end(), last])]

    def _opening(self) -> list[str]:
        opened, self._opened = self._opened, True
        return [] if opened else [line_of("message_start", message=self._message([]))]

    def _lines(self, piece: Piece) -> list[str]:
        if self.sample.finish is not None:
            return []
        events = self.sample.read(piece)
        if self.facts.log is not None:
            self.facts.log("".join(event.text for event in events), piece.token_ids, self.sample.finish)
        return self._blocks.read(events) if events else []

    def _message(self, content: list[Json]) -> Json:
        message: Json = {"id": self.facts.id, "type": "message", "role": "assistant", "model": self.facts.model}
        return message | {"content": content, **self.stop, "usage": self.usage}
