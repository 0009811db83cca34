"""OpenAI's chat messages and Responses items as harmony messages: decides the text that the model reads.

The text of system and developer messages becomes harmony's developer instructions; harmony's own system turn has the
identity, the date, the reasoning effort and the channels. Messages are mappings or pydantic objects of any client
library. Every refusal is a ConversationError that names the message.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from openai_harmony import (
    Author,
    DeveloperContent,
    HarmonyError,
    Message,
    ReasoningEffort,
    Role,
    SystemContent,
    ToolDescription,
)
from pydantic import BaseModel

from npu_gptoss.errors import InputError

REASONING_EFFORTS = ("low", "medium", "high")
# what clients send -> what gpt-oss was trained on. `none` is refused: gpt-oss always reasons.
_EFFORTS = {effort: effort for effort in REASONING_EFFORTS} | {"minimal": "low"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FUNCTIONS = "functions."
# type of a content part -> its field that holds the text
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text") | {"refusal": "refusal"}


class ConversationError(InputError):
    """A conversation that cannot be written in harmony. `param` is the field of the request, where there is one."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, field=param)
        self.param = param


def reasoning_effort(word: object, param: str = "reasoning_effort") -> str:
    """low, medium or high; medium for None, low for `minimal`. Raises ConversationError for any other word."""
    if word is None:
        return "medium"
    if isinstance(word, str) and word in _EFFORTS:
        return _EFFORTS[word]
    raise ConversationError(
        f"{param}: expected {', '.join(REASONING_EFFORTS)} (or minimal, which is low here), got {word!r:.80}.", param
    )


def conversation(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] = (),
    effort: object = None,
    date: str | None = None,
    identity: str | None = None,
    instructions_in_system: bool = False,
) -> list[Message]:
    """The harmony messages of a chat: system turn, one developer turn when there is something in it, the messages.

    tools: functions as in OpenAI's chat API. date: YYYY-MM-DD, default today. identity: in the place of "You are
    ChatGPT, …". instructions_in_system: the first instructions go to the system turn's identity (an option of vLLM's).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConversationError(f"messages: expected a list of messages, got {messages!r:.80}.")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConversationError(f"tools: expected a list of tools, got {tools!r:.80}.", "tools")
    names: dict[str, str] = {}
    turns: list[Message] = []
    for number, message in enumerate(messages):
        turns += chat_message(f"messages[{number}]", message, names)
    return with_head(turns, tools, effort, date, identity, instructions_in_system)


def with_head(
    turns: Sequence[Message],
    tools: Sequence[Any] = (),
    effort: object = None,
    date: str | None = None,
    identity: str | None = None,
    instructions_in_system: bool = False,
) -> list[Message]:
    """Harmony messages of a conversation behind its system turn and the developer turn with its tools."""
    turns = join_developer_turns(turns)
    instructions = None
    if instructions_in_system and turns and turns[0].author.role is Role.DEVELOPER:
        instructions = turns.pop(0).content[0].instructions
    head = [system_message(effort, date, instructions, identity), developer_message(None, tools)]
    return join_developer_turns([*head, *turns])


def system_message(
    effort: object = None, date: str | None = None, instructions: str | None = None, identity: str | None = None
) -> Message:
    """harmony's system turn. Raises ConversationError for an unknown effort and for a date of another form."""
    today = datetime.date.today().isoformat()
    try:
        date = today if date is None else datetime.date.fromisoformat(date).isoformat()
    except (TypeError, ValueError):
        raise ConversationError(f"date: expected a date like {today}, got {date!r:.80}.", "date") from None
    content = SystemContent.new().with_conversation_start_date(date)
    content.with_reasoning_effort(ReasoningEffort[reasoning_effort(effort).upper()])
    if identity or instructions:
        content.with_model_identity("\n".join(filter(None, (identity or content.model_identity, instructions))))
    return Message.from_role_and_content(Role.SYSTEM, content)


def developer_message(instructions: str | None, tools: Sequence[Any] | None = ()) -> Message:
    """A developer turn; it is empty, and `join_developer_turns` drops it, when there is neither."""
    content = DeveloperContent.new()
    if instructions:
        content.with_instructions(instructions)
    if tools:
        content.with_function_tools([tool_description(number, tool) for number, tool in enumerate(tools)])
    return Message.from_role_and_content(Role.DEVELOPER, content)


def tool_description(number: int, tool: Any) -> ToolDescription:
    """A function tool of the chat API (`{"type", "function": {…}}`) or of the Responses API (flat).

    A function without arguments has no parameters: template and guide write `() => any` for it.
    """
    fields, place = fields_of(tool), f"tools[{number}]"
    function = fields.get("function", fields) if fields.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ConversationError(
            f'{place}: expected {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.80}.', place
        )
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping) and not parameters.get("properties"):
        parameters = None
    try:
        return ToolDescription.new(function["name"], function.get("description") or "", parameters)
    except (ValueError, HarmonyError) as error:  # pydantic's own check
        raise ConversationError(f"{place} ({function['name']!r:.80}) cannot be written: {error}", place) from None


def join_developer_turns(messages: Iterable[Message]) -> list[Message]:
    """One developer turn where several would follow each other, with all instructions and tools; none that is empty."""
    joined: list[Message] = []
    for message in messages:
        if message.author.role is not Role.DEVELOPER:
            joined.append(message)
            continue
        instructions, tools = [], {}
        parts = list(message.content)
        if joined and joined[-1].author.role is Role.DEVELOPER:
            parts = [*joined.pop().content, *parts]
        for part in parts:
            if isinstance(part, DeveloperContent):
                instructions.append(part.instructions)
                tools |= part.tools or {}
            else:
                instructions.append(getattr(part, "text", ""))
        text = "\n\n".join(filter(None, instructions))
        if text or tools:
            content = DeveloperContent(instructions=text or None, tools=tools or None)
            joined.append(Message.from_role_and_content(Role.DEVELOPER, content))
    return joined


def chat_message(place: str, message: Any, names: dict[str, str]) -> list[Message]:
    """The harmony messages of one message of a chat. place: its path in the request, for errors.

    `names` maps the id of each tool call so far to its function's name; an assistant message adds to it.
    """
    if isinstance(message, Message):
        return [message]
    fields = fields_of(message)
    role, content = fields.get("role"), fields.get("content")
    if content is None and role in ("system", "developer", "user"):
        raise ConversationError(
            f"{place}.content: expected a text or a list of text parts, got null.", f"{place}.content"
        )
    if role in ("system", "developer"):
        return [developer_message(as_text(content, f"{place}.content"))]
    if role == "user":
        return [Message.from_role_and_content(Role.USER, as_text(content, f"{place}.content"))]
    if role == "assistant":
        return _assistant_messages(place, fields, names)
    if role == "function":  # deprecated: the function's name in the place of the id of its call
        return [tool_result(_text_field(fields, "name", place), as_text(content, f"{place}.content"))]
    if role == "tool":
        name = names.get(fields.get("tool_call_id") or "", fields.get("name"))
        if not isinstance(name, str) or not name:
            raise ConversationError(
                f"{place}.tool_call_id: expected the id of a call that an assistant message before it makes, got "
                f"{fields.get('tool_call_id')!r:.80}. Send the assistant's message with its tool_calls too.",
                f"{place}.tool_call_id",
            )
        return [tool_result(name, as_text(content, f"{place}.content"))]
    raise ConversationError(f"{place}.role: expected {', '.join(ROLES)}, got {role!r:.80}.", f"{place}.role")


def _assistant_messages(place: str, fields: Mapping[str, Any], names: dict[str, str]) -> list[Message]:
    content = fields.get("content")
    thought, text = _reasoning_and_text(content, f"{place}.content")
    reasoning = as_text(fields.get("reasoning_content") or fields.get("reasoning"), f"{place}.reasoning") or thought
    # the rendering leaves reasoning out once an answer has followed it
    turns = [said(reasoning, "analysis")] if reasoning else []
    calls = [(f"{place}.tool_calls[{i}]", call) for i, call in enumerate(fields.get("tool_calls") or ())]
    if (deprecated := fields.get("function_call")) is not None:
        calls.append((f"{place}.function_call", {"function": deprecated}))
    if text or (content is not None and not calls and not thought):
        turns.append(said(text, "commentary" if calls else "final"))
    for path, call in calls:
        custom = fields_of(fields_of(call).get("custom"))
        function = fields_of(fields_of(call).get("function")) or custom
        name, arguments = _text_field(function, "name", path), function.get("input" if custom else "arguments") or ""
        if isinstance(arguments, Mapping):
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, str):
            raise ConversationError(f"{path}: expected arguments as a text, got {arguments!r:.80}.", path)
        names[fields_of(call).get("id") or ""] = name
        turns.append(tool_call(name, custom_arguments(arguments) if custom else arguments))
    return turns


def custom_arguments(text: str) -> str:
    """The arguments of the function that replaces a custom tool; its input is one text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def _text_field(fields: Mapping[str, Any], name: str, place: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise ConversationError(f"{place}.{name}: expected a text, got {value!r:.80}.", f"{place}.{name}")
    return value


def _reasoning_and_text(content: Any, place: str) -> tuple[str, str]:
    """Parts of type `thinking` and `reasoning`, which clients of other servers send back, are the model's reasoning."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return "", as_text(content, place)
    parts = [(fields_of(part).get("type"), part) for part in content]
    thought = [
        as_text(fields_of(part).get("thinking") or fields_of(part).get("text") or fields_of(part).get("summary"), place)
        for kind, part in parts
        if kind in ("thinking", "reasoning")
    ]
    rest = [part for kind, part in parts if kind not in ("thinking", "reasoning", "redacted_thinking")]
    return "\n".join(filter(None, thought)), as_text(rest, place)


def said(text: str, channel: str) -> Message:
    return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def tool_call(name: str, arguments: str) -> Message:
    """`json`, not `<|constrain|>json`: docs/decisions.md."""
    return said(arguments, "commentary").with_recipient(_function(name)).with_content_type("json")


def tool_result(name: str, output: str) -> Message:
    author = Author.new(Role.TOOL, _function(name))
    return Message.from_author_and_content(author, output).with_channel("commentary").with_recipient("assistant")


def as_text(content: Any, place: str = "messages") -> str:
    """The text of a message's content: a string, None, or a list of parts. gpt-oss reads nothing but text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise ConversationError(f"{place}: expected a text or a list of text parts, got {content!r:.80}.", place)
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        fields, path = fields_of(part), f"{place}[{number}]"
        kind = fields.get("type", "text")
        if kind not in TEXT_PARTS or ("type" not in fields and "text" not in fields):
            kind = fields.get("type") or next(iter(fields), None)
            raise ConversationError(
                f"{path}: expected a part of text, which is all that gpt-oss reads, got one of type {kind!r:.80}.", path
            )
        text = fields.get(TEXT_PARTS[kind]) or ""
        if not isinstance(text, str):
            raise ConversationError(f"{path}.text: expected a text, got {text!r:.80}.", f"{path}.text")
        texts.append(text)
    return "".join(texts)


def without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning is dropped once an answer has followed it; until then, between tool calls, the model reads it.

    openai-harmony drops only reasoning before the first answer; the guide and the published template mean every one.
    """
    last = max((number for number, message in enumerate(messages) if message.channel == "final"), default=-1)
    return [m for number, m in enumerate(messages) if number > last or m.channel != "analysis"]


def _function(name: str) -> str:
    return FUNCTIONS + name.removeprefix(FUNCTIONS)


def fields_of(value: Any) -> Mapping[str, Any]:
    """A message, a part or a tool as a mapping; an empty one when it is none."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value if isinstance(value, Mapping) else {}
