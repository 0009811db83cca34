"""OpenAI's chat messages and Responses items as harmony messages: the one place that decides what the model reads.

The text of system and developer messages becomes harmony's developer instructions; harmony's own system turn has the
identity, the date, the reasoning effort and the channels. Messages are mappings or pydantic objects of any client
library. Every refusal is a ConversationError that names the message.
"""

from __future__ import annotations

import datetime
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
ROLES = ("system", "developer", "user", "assistant", "tool")
FUNCTIONS = "functions."
# type of a content part -> its field that holds the text
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text") | {"refusal": "refusal"}


class ConversationError(InputError):
    """A conversation that cannot be written in harmony. `param` is the field of the request, where there is one."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message)
        self.param = param


def reasoning_effort(word: object, param: str = "reasoning_effort") -> str:
    """low, medium or high; medium for None, low for `minimal`. Raises ConversationError for any other word."""
    if word is None:
        return "medium"
    if isinstance(word, str) and word in _EFFORTS:
        return _EFFORTS[word]
    raise ConversationError(
        f"{param} must be {', '.join(REASONING_EFFORTS)} (or minimal, which is taken as low), got {word!r:.80}", param
    )


def conversation(
    messages: Sequence[Any],
    *,
    tools: Sequence[Any] = (),
    effort: object = None,
    date: str | None = None,
    instructions_in_system: bool = False,
) -> list[Message]:
    """The harmony messages of a chat: system turn, one developer turn when there is something in it, the messages.

    tools as in OpenAI's chat API; date YYYY-MM-DD, default today. instructions_in_system: the first instructions go
    to the system turn's identity, which vLLM has an option for.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise ConversationError(f"messages must be a list, got {messages!r:.80}")
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise ConversationError(f"tools must be a list, got {tools!r:.80}", "tools")
    names: dict[str, str] = {}
    turns: list[Message] = []
    for number, message in enumerate(messages):
        turns += chat_message(number, message, names)
    turns = join_developer_turns(turns)
    instructions = None
    if instructions_in_system and turns and turns[0].author.role is Role.DEVELOPER:
        instructions = turns.pop(0).content[0].instructions
    head = [system_message(effort, date, instructions), developer_message(None, tools)]
    return join_developer_turns([*head, *turns])


def system_message(effort: object = None, date: str | None = None, instructions: str | None = None) -> Message:
    """harmony's system turn. Raises ConversationError for an unknown effort and a date that is none."""
    today = datetime.date.today().isoformat()
    try:
        date = today if date is None else datetime.date.fromisoformat(date).isoformat()
    except (TypeError, ValueError):
        raise ConversationError(f"the date must be written like {today}, got {date!r:.80}", "date") from None
    content = SystemContent.new().with_conversation_start_date(date)
    content.with_reasoning_effort(ReasoningEffort[reasoning_effort(effort).upper()])
    if instructions:
        content.with_model_identity(f"{content.model_identity}\n{instructions}")
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
    fields = _fields(tool)
    function = fields.get("function", fields) if fields.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConversationError(
            f'tool {number} must be {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.80}', "tools"
        )
    parameters = function.get("parameters")
    if isinstance(parameters, Mapping) and not parameters.get("properties"):
        parameters = None
    try:
        return ToolDescription.new(function["name"], function.get("description") or "", parameters)
    except (ValueError, HarmonyError) as error:  # pydantic's own check
        name = function["name"]
        raise ConversationError(f"tool {number} ({name!r:.80}) cannot be written: {error}", "tools") from None


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


def chat_message(number: int, message: Any, names: dict[str, str]) -> list[Message]:
    """The harmony messages of one message of a chat; number: its place, for errors.

    `names` maps the id of each tool call so far to its function's name; an assistant message adds to it.
    """
    if isinstance(message, Message):
        return [message]
    fields = _fields(message)
    role, content = fields.get("role"), fields.get("content")
    where = f"message {number} ({role})"
    if content is None and role in ("system", "developer", "user"):
        raise ConversationError(f"{where} has no content; expected a text or a list of text parts.")
    if role in ("system", "developer"):
        return [developer_message(as_text(content, where))]
    if role == "user":
        return [Message.from_role_and_content(Role.USER, as_text(content, where))]
    if role == "assistant":
        return _assistant_messages(where, fields, names)
    if role == "tool":
        name = names.get(fields.get("tool_call_id", ""), fields.get("name"))
        if not isinstance(name, str) or not name:
            raise ConversationError(
                f"{where} answers the tool_call_id {fields.get('tool_call_id')!r:.80}, but no assistant message before "
                "it makes that call. Send the assistant's message with its tool_calls too, or the tool's name."
            )
        return [tool_result(name, as_text(content, where))]
    raise ConversationError(f"message {number} needs a role of {', '.join(ROLES)}, got {role!r:.80}")


def _assistant_messages(where: str, fields: Mapping[str, Any], names: dict[str, str]) -> list[Message]:
    turns = []
    reasoning = as_text(fields.get("reasoning_content") or fields.get("reasoning"), where)
    if reasoning:
        turns.append(said(reasoning, "analysis"))  # the rendering leaves it out once an answer has followed
    calls = list(fields.get("tool_calls") or ())
    content = fields.get("content")
    text = as_text(content, where)
    if text or (content is not None and not calls):
        turns.append(said(text, "commentary" if calls else "final"))
    for call in calls:
        function = _fields(_fields(call).get("function"))
        if not isinstance(function.get("name"), str) or not isinstance(function.get("arguments") or "", str):
            raise ConversationError(
                f"{where}: a tool call needs a function with name and arguments as texts, got {call!r:.80}"
            )
        names[_fields(call).get("id") or ""] = function["name"]
        turns.append(tool_call(function["name"], function.get("arguments") or ""))
    return turns


def response_item(item: Any, names: dict[str, str]) -> list[Message]:
    """The harmony messages of one input item of /v1/responses; a function call adds to `names` (call id -> function).

    A reasoning item without text, which clients send back with an id or a summary alone, gives none.
    """
    fields = _fields(item)
    kind = fields.get("type") or "message"
    if kind == "message":
        role, text = fields.get("role"), as_text(fields.get("content"), "an input message", "input")
        if role in ("system", "developer"):
            return [developer_message(text)]
        if role == "assistant":
            return [said(text, "final")]
        if role != "user":
            roles = ", ".join(ROLES[:4])
            raise ConversationError(f"an input message needs a role of {roles}, got {role!r:.80}", "input")
        return [Message.from_role_and_content(Role.USER, text)]
    if kind == "reasoning":
        text = as_text(fields.get("content"), "a reasoning item", "input")
        return [said(text, "analysis")] if text else []
    if kind == "function_call":
        names[fields["call_id"]] = fields["name"]
        return [tool_call(fields["name"], fields["arguments"])]
    if kind == "function_call_output":
        call_id = fields["call_id"]
        if call_id not in names:
            raise ConversationError(
                f"No call message found for {call_id!r:.80}: send the function_call item before its output.", "input"
            )
        return [tool_result(names[call_id], as_text(fields["output"], "a function's output", "input"))]
    raise ConversationError(f"Unknown input type: {kind!r:.80}", "input")


def with_preambles(messages: Iterable[Message]) -> list[Message]:
    """A Responses item does not say whether it was an answer or came before a call; one that a call follows did."""
    found: list[Message] = []
    for message in messages:
        is_call = message.author.role is Role.ASSISTANT and message.recipient is not None
        if is_call and found and found[-1].channel == "final":
            found[-1] = found[-1].model_copy(update={"channel": "commentary"})
        found.append(message)
    return found


def said(text: str, channel: str) -> Message:
    return Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def tool_call(name: str, arguments: str) -> Message:
    """`json`, not `<|constrain|>json`: docs/decisions.md."""
    return said(arguments, "commentary").with_recipient(_function(name)).with_content_type("json")


def tool_result(name: str, output: str) -> Message:
    author = Author.new(Role.TOOL, _function(name))
    return Message.from_author_and_content(author, output).with_channel("commentary").with_recipient("assistant")


def as_text(content: Any, where: str = "a message", param: str = "messages") -> str:
    """The text of a message's content: a string, None, or a list of parts. gpt-oss reads nothing but text."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, Mapping) or not isinstance(content, Iterable):
        raise ConversationError(f"{where}: content must be a text or a list of text parts, got {content!r:.80}", param)
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
            continue
        fields = _fields(part)
        kind = fields.get("type", "text")
        if kind not in TEXT_PARTS:
            raise ConversationError(
                f"{where}: gpt-oss reads text only, the content has a part of type {kind!r:.80}. Leave it out.", param
            )
        text = fields.get(TEXT_PARTS[kind]) or ""
        if not isinstance(text, str):
            raise ConversationError(f"{where}: the text of a part must be a text, got {text!r:.80}", param)
        texts.append(text)
    return "".join(texts)


def without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning is dropped once an answer has followed it; until then, between tool calls, the model reads it.

    openai-harmony drops only what stands before the first answer; the guide and the published template mean every one.
    """
    last = max((number for number, message in enumerate(messages) if message.channel == "final"), default=-1)
    return [m for number, m in enumerate(messages) if number > last or m.channel != "analysis"]


def _function(name: str) -> str:
    return FUNCTIONS + name.removeprefix(FUNCTIONS)


def _fields(value: Any) -> Mapping[str, Any]:
    """A message, a part or a tool as a mapping; an empty one when it is none."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value if isinstance(value, Mapping) else {}
