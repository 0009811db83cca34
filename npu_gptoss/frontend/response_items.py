"""Items of /v1/responses: a request's items to harmony messages, and a turn's parts to a response's items.

A request's items need no `id` and no `status`: clients leave them out or repeat ours. A call of a tool that only
OpenAI's models know (`local_shell`, `shell`, `apply_patch`), or of an MCP server, becomes a call of a function of that
name, so that the model knows about it. Other items of hosted tools are left out with a warning, and parts of a tool's
output that are no text are replaced by a sentence. `additional_tools` and `tool_search_output` add tools. Every refusal
is a ConversationError that names the item's field.

A client that keeps no reasoning text (Codex) sends back the `encrypted_content` of a reasoning item, so that the model
can read its reasoning between its calls. Ours is encoded, not encrypted: anyone who has it can read the reasoning.
"""

from __future__ import annotations

import base64
import binascii
import json
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openai_harmony import Message, Role

from npu_gptoss.frontend.sample import new_id
from npu_gptoss.frontend.tools import SEARCH, Tool, Tools, custom_input, names_of, readable
from npu_gptoss.frontend.turn import Part
from npu_gptoss.harmony.conversation import (
    TEXT_PARTS,
    ConversationError,
    as_text,
    call_arguments,
    developer_message,
    expected,
    fields_of,
    reasoning_and_text,
    said,
    sequence,
    text_field,
    tool_call,
    tool_result,
)
from npu_gptoss.harmony.parser import Kind

Json = dict[str, Any]
PREFIX = "npu_gptoss."  # of an encoded text
MOST = 16 * 1024 * 1024  # bytes of a decoded text: a small encoded text can expand to any length
ROLES = ("user", "assistant", "system", "developer")

# kind of a call that is no function call -> the function for it, and the field with its arguments
CALLS = {
    "tool_search_call": (SEARCH, "arguments"),
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
}
RESULTS = {f"{kind}_output" for kind in ("function_call", "custom_tool_call", *CALLS)} | {"tool_search_output"}
REFERENCE = "item_reference"
WITH_TOOLS = {"additional_tools", "tool_search_output"}
SEARCHES = {"tool_search_call", "tool_search_output"}  # no call_id if OpenAI's servers searched
LEFT_OUT = {
    *("web_search_call", "file_search_call", "code_interpreter_call", "computer_call", "computer_call_output"),
    *("image_generation_call", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
    *("program", "program_output"),
}
_COMPACTED = "this server cannot read a conversation that another server compacted; send its items."
# kind -> why it is refused
REFUSED = {
    "compaction": _COMPACTED,
    "compaction_summary": _COMPACTED,
    "compaction_trigger": "this server compacts no conversation; ask for a summary in words.",
    "configuration_update": "this server reads no such item; set reasoning and text of the request.",
}


@dataclass(frozen=True)
class Conversation:
    """A conversation without its instructions. names: call id -> function. items: of requests and responses, by id."""

    turns: Sequence[Message] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    items: Mapping[str, Json] = field(default_factory=dict)


def encoded(text: str) -> str:
    """Encodes a text as the `encrypted_content` of a reasoning item."""
    return PREFIX + base64.b64encode(zlib.compress(text.encode())).decode()


def decoded(given: Any, place: str) -> str:
    """Decodes an `encrypted_content`; "" for another server's. Raises ConversationError if ours is damaged."""
    if not isinstance(given, str) or not given.startswith(PREFIX):
        return ""
    try:
        inflate = zlib.decompressobj()
        raw = inflate.decompress(base64.b64decode(given.removeprefix(PREFIX), validate=True), MOST)
        if inflate.eof:
            return raw.decode()
    except (binascii.Error, zlib.error, UnicodeError):
        pass
    raise expected(place, "a value that this server sent, unchanged", given)


def with_preambles(turns: Sequence[Message]) -> list[Message]:
    """Moves an assistant's message to `commentary` if a call follows it before the user's next message."""
    found, called = [], False
    for message in reversed(turns):
        role = message.author.role
        if role is Role.USER:
            called = False
        elif role is Role.ASSISTANT and message.recipient is not None:
            called = True
        elif called and message.channel == "final":
            message = message.model_copy(update={"channel": "commentary"})
        found.append(message)
    return found[::-1]


def read_input(
    given: Any, tools: Tools, before: Conversation, warnings: list[str], find: Callable[[str], Mapping[str, Any] | None]
) -> Conversation:
    """Returns the conversation followed by a request's items. find: an item of another stored response, by id.

    Adds a sentence to `warnings` for each omission.
    """
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, Sequence):
        raise expected("input", "a text or a list of items", given)
    reader = _Reader(tools, dict(before.names), before.items, find, warnings)
    turns, listed = list(before.turns), dict(before.items)
    for number, item in enumerate(items):
        place = f"input[{number}]"
        item = reader.resolved(place, item)
        turns += reader.messages(place, item)
        own = _listed(fields_of(item))
        listed[own["id"]] = own
    return Conversation(with_preambles(turns), reader.names, listed)


def _kind(fields: Mapping[str, Any]) -> Any:
    return fields.get("type") or ("message" if "role" in fields else REFERENCE if "id" in fields else None)


def _listed(fields: Mapping[str, Any]) -> Json:
    """Returns an item of a request as `input_items` lists it: with its kind, an id, a status and parts of a message."""
    kind = _kind(fields)
    own = {**fields, "type": kind, "status": fields.get("status") or "completed"}
    if not isinstance(own.get("id"), str) or not own["id"]:
        own["id"] = new_id("msg" if kind == "message" else "item")
    if kind == "message" and isinstance(own.get("content"), str):
        answer = own.get("role") == "assistant"
        part = {"type": "output_text", "annotations": []} if answer else {"type": "input_text"}
        own["content"] = [part | {"text": own["content"]}]
    return own


def tools_of(given: Any) -> list[tuple[str, Any]]:
    """Returns path and tool of each tool that input items add to the request's."""
    found: list[tuple[str, Any]] = []
    for number, item in enumerate(given if isinstance(given, list) else ()):
        fields, place = fields_of(item), f"input[{number}].tools"
        if fields.get("type") in WITH_TOOLS:
            tools = sequence(fields.get("tools"), place, "a list of tools")
            found += [(f"{place}[{index}]", tool) for index, tool in enumerate(tools)]
    return found


@dataclass
class _Reader:
    tools: Tools
    names: dict[str, str]
    items: Mapping[str, Json]
    find: Callable[[str], Mapping[str, Any] | None]
    warnings: list[str]
    left_out: set[str] = field(default_factory=set)  # kinds
    waiting: dict[str, list[str]] = field(default_factory=dict)  # calls without a result, by id, which they may share

    def messages(self, place: str, item: Any) -> list[Message]:
        fields = fields_of(item)
        kind = _kind(fields)
        if kind == "message":
            return self._message(place, fields)
        if kind == "reasoning":
            text = as_text(fields.get("content"), f"{place}.content")
            text = text or decoded(fields.get("encrypted_content"), f"{place}.encrypted_content")
            return [said(text, "analysis")] if text else []
        if kind == "additional_tools":  # `tools_of` has read it
            return []
        if kind in LEFT_OUT or (kind in SEARCHES and fields.get("call_id") is None):
            if kind not in self.left_out:
                self.warnings.append(f"{place} is left out: gpt-oss reads no item of type {kind}")
            self.left_out.add(kind)
            return []
        if kind in ("function_call", "custom_tool_call"):
            return self._call(place, fields, kind == "custom_tool_call")
        if kind in CALLS:
            name, arguments = CALLS[kind]
            self._name(place, fields, name)
            given = fields.get(arguments)
            return [tool_call(name, given if isinstance(given, str) else json.dumps(given, ensure_ascii=False))]
        if kind in RESULTS:
            return self._result(place, fields, kind)
        if kind == "mcp_call":
            return self._mcp(place, fields)
        if kind in REFUSED:
            raise ConversationError(f"{place}: {REFUSED[kind]}", place)
        what = "an item of OpenAI's Responses API"
        raise expected(f"{place}.type", what, kind) if fields else expected(place, what, item)

    def _message(self, place: str, fields: Mapping[str, Any]) -> list[Message]:
        role, content, path = fields.get("role"), fields.get("content"), f"{place}.content"
        if role not in ROLES:
            raise expected(f"{place}.role", ", ".join(ROLES), role)
        if role == "user":
            self.waiting.clear()
        if fields.get("tool_calls"):  # a chat's message
            raise expected(f"{place}.tool_calls", "an item of type function_call for each call", fields["tool_calls"])
        if role == "assistant":
            thought, text = reasoning_and_text(content, path)
            channel = "commentary" if fields.get("phase") == "commentary" else "final"
            turns = [said(thought, "analysis")] if thought else []
            return turns if content is None or (thought and not text) else [*turns, said(text, channel)]
        if content is None:
            raise expected(path, "a text or a list of text parts", None)
        text = as_text(content, path)
        return [Message.from_role_and_content(Role.USER, text) if role == "user" else developer_message(text)]

    def _call(self, place: str, fields: Mapping[str, Any], custom: bool) -> list[Message]:
        name = self.tools.flat_name(text_field(fields, "name", place), fields.get("namespace"))
        self._name(place, fields, name)
        return [tool_call(name, call_arguments(fields, place, custom))]

    def _name(self, place: str, fields: Mapping[str, Any], name: str) -> None:
        """Records a call's function: a result names the call's id, and with some clients the item's."""
        call_id = text_field(fields, "call_id" if fields.get("call_id") or not fields.get("id") else "id", place)
        self.names[call_id] = name
        self.waiting.setdefault(call_id, []).append(name)
        if isinstance(fields.get("id"), str):
            self.names.setdefault(fields["id"], name)

    def _result(self, place: str, fields: Mapping[str, Any], kind: str) -> list[Message]:
        call_id = fields.get("call_id") or fields.get("id")
        key = call_id if isinstance(call_id, str) else ""
        name = self.waiting[key].pop(0) if self.waiting.get(key) else self.names.get(key)
        if name is None:
            raise expected(
                f"{place}.call_id",
                "the id of a call before this item",
                call_id,
                f" Send the {kind.removesuffix('_output')} too.",
            )
        output = fields.get("output")
        if kind == "tool_search_output":
            found = ", ".join(names_of(sequence(fields.get("tools"), f"{place}.tools"), f"{place}.tools"))
            return [tool_result(name, f"These tools can be called now: {found}" if found else "No tool was found.")]
        if kind == "apply_patch_call_output" and not output:
            output = fields.get("status")
        if kind not in ("function_call_output", "custom_tool_call_output") and not _is_text(output):
            output = json.dumps(output, ensure_ascii=False)
        path = f"{place}.output"
        return [tool_result(name, as_text(readable(output, path, self.warnings), path))]

    def _mcp(self, place: str, fields: Mapping[str, Any]) -> list[Message]:
        """Converts a call that another server made, with its result."""
        name = self.tools.flat_name(text_field(fields, "name", place), fields.get("server_label"))
        result = [fields[field] for field in ("output", "error") if fields.get(field) is not None]
        texts = [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in result]
        call = tool_call(name, as_text(fields.get("arguments"), f"{place}.arguments"))
        return [call, *([tool_result(name, "\n".join(texts))] if texts else [])]

    def resolved(self, place: str, item: Any) -> Any:
        """Returns the stored item that this one refers to, or the item itself."""
        fields = fields_of(item)
        if _kind(fields) != REFERENCE:
            return item
        name = fields.get("id")
        found = (self.items.get(name) or self.find(name)) if isinstance(name, str) else None
        if found is None:
            raise expected(place, "an item itself, or the id of an item of a stored response", name)
        return found


def _is_text(value: Any) -> bool:
    if not isinstance(value, list):
        return value is None or isinstance(value, str)
    return all(isinstance(part, str) or fields_of(part).get("type") in TEXT_PARTS for part in value)


def _search_arguments(text: str) -> Json:
    """Parses a search's `arguments`; a text that is no object becomes the search term."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    return {"arguments": given if isinstance(given, dict) else {"query": text}}


# kind of an item -> prefixes of its id and of the events of its text
_SPELLED = {
    Kind.REASONING: ("rs", "response.reasoning_text"),
    Kind.ANSWER: ("msg", "response.output_text"),
    "function": ("fc", "response.function_call_arguments"),
    "custom": ("ctc", "response.custom_tool_call_input"),
    SEARCH: ("tsc", ""),  # has no events of its own
}


@dataclass(slots=True)
class Item:
    """A response's item: a part of the turn that the client sees. index: its place. tool: of a call."""

    part: Part
    index: int
    id: str
    call_id: str
    event: str
    tool: Tool | None = None
    logprobs: list[Json] = field(default_factory=list)

    @classmethod
    def of(cls, part: Part, index: int, tool: Tool | None) -> Item:
        prefix, event = _SPELLED[part.kind if tool is None else tool.kind]
        name = uuid.uuid4().hex
        return cls(part, index, f"{prefix}_{name}", f"call_{name}", event, tool)

    @property
    def custom(self) -> bool:
        return self.tool is not None and self.tool.kind == "custom"

    @property
    def text(self) -> str:
        return custom_input(self.part.text) if self.custom else self.part.text

    def content(self, empty: bool = False) -> Json:
        """Returns the content of reasoning or an answer; empty: as it begins."""
        text = "" if empty else self.part.text
        if self.part.kind is Kind.REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": [] if empty else [*self.logprobs]}

    def json(self, with_encoded: bool, empty: bool = False) -> Json:
        """with_encoded: reasoning repeats its text in `encrypted_content`. empty: as the item begins."""
        complete = None if empty else self.part.complete
        own: Json = {"id": self.id, "status": {None: "in_progress", True: "completed", False: "incomplete"}[complete]}
        if self.tool is not None:
            if self.tool.kind == SEARCH:
                given = {"arguments": {}} if empty else _search_arguments(self.text)
                return own | {"type": "tool_search_call", "call_id": self.call_id, "execution": "client"} | given
            kind, text = ("custom_tool_call", "input") if self.custom else ("function_call", "arguments")
            own |= {"type": kind, "call_id": self.call_id, "name": self.tool.own_name, text: "" if empty else self.text}
            return own | ({"namespace": self.tool.namespace} if self.tool.namespace else {})
        content = [] if empty else [self.content()]
        if self.part.kind is Kind.ANSWER:
            return own | {"type": "message", "role": "assistant", "content": content}
        secret = encoded(self.part.text) if with_encoded and not empty else None
        return own | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": secret}
