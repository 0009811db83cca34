"""Anthropic's messages: reads a request of /v1/messages, and turns an engine's steps into its answer.

`_Blocks` makes the blocks of an answer: a stream sends each change, a whole answer the final state. Consecutive parts
of a turn of the same kind make one block, so that a client that reads only the first text block has all of it. The
front end does not read Anthropic's headers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from npu_gptoss.frontend import sample
from npu_gptoss.frontend.engine import Piece, Step
from npu_gptoss.frontend.message_blocks import INVALID_JSON, TOOL_CHANGES, conversation
from npu_gptoss.frontend.request import Asked, Defaults, ask, begin, reading
from npu_gptoss.frontend.sample import Facts, Sample, new_id
from npu_gptoss.frontend.structure import Structure, forced_structure, structure_of_format
from npu_gptoss.frontend.tools import Tools, is_hosted, read_tools
from npu_gptoss.frontend.turn import Event, Turn
from npu_gptoss.harmony.conversation import expected, fields_of, mapping, sequence
from npu_gptoss.harmony.encoding import ContextError
from npu_gptoss.harmony.parser import Kind

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
EFFORTS = {"xhigh": "high", "max": "high", THINKING_OFF: "low"}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}
SIGNATURE = "bnB1X2dwdG9zcw=="  # of thinking; clients expect one and send it back; it is not read
# Anthropic's own tools have a date: bash_20250124, tool_search_tool_bm25_20251119
_DATED = re.compile(r"\w+_\d{8}|mcp_toolset")
# Placeholder for a tool that is left out, so that later tools keep their numbers
_NO_TOOL = {"type": "namespace", "name": "left_out", "tools": ()}
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


def error_body(message: str, status: int, request_id: str | None = None) -> Json:
    """Returns an error in Anthropic's form."""
    body: Json = {"type": "error", "error": {"type": error_type(status), "message": message}}
    return body | ({"request_id": request_id} if request_id else {})


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
    config = mapping(body.get("output_config"), "output_config")
    tools = _tools(body, warnings)
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


def _tools(body: Mapping[str, Any], warnings: list[str]) -> Tools:
    given, choice = sequence(body.get("tools"), "tools"), body.get("tool_choice")
    functions = [_function(tool, f"tools[{number}]", warnings) for number, tool in enumerate(given)]
    if functions and all(function is _NO_TOOL for function in functions):
        # Claude Code's web search is such a request: it would present invented text as search results
        kind = fields_of(given[0]).get("type")
        raise expected("tools[0].type", "at least one tool with an input_schema", kind, " This server does not run it.")
    _change_tools(functions, body["messages"], _deferred(given, body["messages"]), warnings)
    if choice is None:
        return read_tools(functions)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in CHOICES:
        raise expected("tool_choice.type", ", ".join(CHOICES), kind or choice)
    wanted = {"type": "function", "name": choice.get("name")} if kind == "tool" else CHOICES[kind]
    return read_tools(functions, wanted, parallel=choice.get("disable_parallel_tool_use") is not True)


def _function(tool: Any, place: str, warnings: list[str]) -> Any:
    """Converts a tool to the form of /v1/responses, which `read_tools` reads."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(tool, Mapping) and kind in (None, "custom"):
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise expected(f"{place}.input_schema", "a JSON schema", schema)
        own = {name: tool.get(name) for name in ("name", "description", "strict")}
        return {"type": "function", **own, "parameters": {"type": "object"} | dict(schema)}
    if is_hosted(kind) or (isinstance(kind, str) and _DATED.fullmatch(kind)):
        name = tool.get("name") or tool.get("mcp_server_name")
        named = f" ({name:.80})" if isinstance(name, str) else ""
        warnings.append(f"{place} is left out: this server runs no tool of type {kind:.80}{named}")
        return _NO_TOOL
    return tool


def _deferred(tools: Sequence[Any], messages: Sequence[Any]) -> set[Any]:
    """Returns the tools with `defer_loading` that the prompt hides, because no `tool_reference` names them yet.

    All are shown if the model cannot search for them: Anthropic's servers would search, or no other tool exists.
    """
    fields = [fields_of(tool) for tool in tools]
    names = {tool.get("name") for tool in fields if tool.get("defer_loading")}
    found_by_server = any(str(tool.get("type")).startswith("tool_search") for tool in fields)
    own = {tool.get("name") for tool in fields if tool.get("type") in (None, "custom")}
    if found_by_server or own <= names:
        return set()
    return names.difference(_references([fields_of(message) for message in messages]))


def _references(blocks: Any) -> Iterator[Any]:
    """Yields the names in `tool_reference` blocks, nested blocks included."""
    for fields in map(fields_of, blocks if isinstance(blocks, list) else ()):
        if fields.get("type") == "tool_reference":
            yield fields.get("tool_name")
        yield from _references(fields.get("content"))


def _change_tools(functions: list[Any], messages: Sequence[Any], removed: set[Any], warnings: list[str]) -> None:
    """Applies the blocks of system messages that add and remove tools: the prompt shows the final set.

    removed: names that are hidden unless a block adds them.
    """
    for number, message in enumerate(messages):
        content = fields_of(message).get("content")
        for index, block in enumerate(content if isinstance(content, list) else ()):
            fields = fields_of(block)
            if fields.get("type") not in TOOL_CHANGES:
                continue
            place = f"messages[{number}].content[{index}].tool"
            tool = fields_of(fields.get("tool"))
            adds, kind, name = fields["type"] == "tool_addition", tool.get("type"), tool.get("name")
            if adds and kind == "tool_definition":
                added = _function(tool.get("definition"), f"{place}.definition", warnings)
                name = fields_of(added).get("name")
                functions[:] = [_NO_TOOL if _is_named(one, name) else one for one in functions] + [added]
            elif kind != "tool_reference":
                warnings.append(f"{place} is left out: this server runs no tool of type {kind!r:.80}")
                continue
            elif not any(_is_named(one, name) for one in functions):
                raise expected(f"{place}.name", "the name of a tool", name)
            (removed.discard if adds else removed.add)(name)
    functions[:] = [_NO_TOOL if any(_is_named(one, name) for name in removed) else one for one in functions]


def _is_named(tool: Any, name: Any) -> bool:
    return tool is not _NO_TOOL and name is not None and fields_of(tool).get("name") == name


# kind of a part -> type of its block, type of a change, and the field of the text in a change
_TYPES = {
    Kind.ANSWER: ("text", "text_delta", "text"),
    Kind.REASONING: ("thinking", "thinking_delta", "thinking"),
    Kind.CALL: ("tool_use", "input_json_delta", "partial_json"),
}
# In a call's arguments: characters that begin or end a JSON string, and characters that a string must escape
_MARKS = re.compile(r'\\.|["\x00-\x1f]', re.DOTALL)


@dataclass
class _Block:
    """A block of an answer. part: the number of the turn's last part in it. quoted: within a string of arguments."""

    index: int
    kind: Kind
    part: int
    name: str = ""
    id: str = ""
    text: str = ""
    quoted: bool = False
    held: str = ""  # a backslash whose next character has not come

    def arguments(self, text: str) -> str:
        """Returns the next text of a call's arguments. Models write line ends into JSON strings and streaming clients
        fail on them, so they are escaped."""
        text, self.held = self.held + text, ""
        if '"' not in text and "\\" not in text and text.isprintable():
            return text

        def mark(found: re.Match[str]) -> str:
            self.quoted ^= found[0] == '"'
            return json.dumps(found[0])[1:-1] if self.quoted and found[0] < " " else found[0]

        if (len(text) - len(text.rstrip("\\"))) % 2:
            text, self.held = text[:-1], "\\"
        return _MARKS.sub(mark, text)

    def shown(self) -> Json:
        """Returns the block for a whole answer."""
        if self.kind is Kind.CALL:
            return {"type": "tool_use", "id": self.id, "name": self.name, "input": _input(self.text)}
        kind, _, name = _TYPES[self.kind]
        signature = {"signature": SIGNATURE} if self.kind is Kind.REASONING else {}
        return {"type": kind, name: self.text} | signature

    def start(self) -> str:
        kind, _, name = _TYPES[self.kind]
        block: Json = {"type": kind}
        block |= {"id": self.id, "name": self.name, "input": {}} if self.kind is Kind.CALL else {name: ""}
        block |= {"signature": ""} if self.kind is Kind.REASONING else {}
        return _event("content_block_start", index=self.index, content_block=block)

    def delta(self, text: str) -> str:
        """Formats the event without json.dumps of the whole, because every token needs one."""
        _, kind, name = _TYPES[self.kind]
        return (
            f'event: content_block_delta\ndata: {{"type": "content_block_delta", "index": {self.index}, "delta": '
            f'{{"type": "{kind}", "{name}": {json.dumps(text, ensure_ascii=False)}}}}}\n\n'
        )

    def stop(self) -> str:
        signed = {"type": "signature_delta", "signature": SIGNATURE}
        first = _event("content_block_delta", index=self.index, delta=signed) if self.kind is Kind.REASONING else ""
        rest = self.delta(self.held) if self.held else ""
        return first + rest + _event("content_block_stop", index=self.index)


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields}, ensure_ascii=False)}\n\n"


def _input(text: str) -> Json:
    """Returns a call's input from the model's arguments, which may be cut off or no JSON: see INVALID_JSON."""
    try:
        value = json.loads(text or "{}", strict=False)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # Infinity and lone surrogates are no JSON
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {INVALID_JSON: text}


class _Blocks:
    """The blocks of an answer so far; `read` adds events of its turn."""

    def __init__(self) -> None:
        self.all: list[_Block] = []
        self._open: _Block | None = None

    def read(self, events: Sequence[Event]) -> list[str]:
        """Returns the lines that a stream sends for these events."""
        lines: list[str] = []
        for event in events:
            part, kind = event.part, event.part.kind
            if kind is not Kind.CALL and event.what != "more":
                continue
            block, text = self._open, event.text
            if block is None or block.kind is not kind or event.what == "begun":
                lines += self.close()
                block = self._open = self._begun(kind, part.number, part.name)
                lines.append(block.start())
            if block.part != part.number:
                text, block.part = f"\n{text}", part.number
            if text := block.arguments(text) if kind is Kind.CALL else text:
                block.text += text
                lines.append(block.delta(text))
            if event.what == "ended":
                lines += self.close()
        return lines

    def close(self) -> list[str]:
        """Ends the open block."""
        block, self._open = self._open, None
        if block is None:
            return []
        line = block.stop()
        block.text, block.held = block.text + block.held, ""
        return [line]

    def end(self) -> list[str]:
        """Ends the answer. An empty answer gets an empty text: clients read the first block."""
        lines = self.close()
        if not self.all:
            self._open = self._begun(Kind.ANSWER, 0, None)
            lines = [self._open.start(), *self.close()]
        return lines

    def _begun(self, kind: Kind, part: int, name: str | None) -> _Block:
        block = _Block(len(self.all), kind, part, name or "", new_id("toolu") if kind is Kind.CALL else "")
        self.all.append(block)
        return block


class Answer(sample.Answer):
    """The answer to a request of messages. A stream sends the events of a step together."""

    def __init__(self, request: Request, facts: Facts, new_turn: Callable[[], Turn]) -> None:
        self.request = request
        self.sample = Sample(new_turn())
        super().__init__([self.sample], facts)
        self._blocks = _Blocks()
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
        last = _event("message_delta", delta=self.stop, usage=self.usage, **self.extra) + _event("message_stop")
        return ["".join([*self._opening(), *self._blocks.end(), last])]

    def _opening(self) -> list[str]:
        opened, self._opened = self._opened, True
        return [] if opened else [_event("message_start", message=self._message([]))]

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
