"""OpenAI's chat messages and Responses items as harmony messages: decides the text that the model reads.

The text of system and developer messages becomes harmony's developer instructions; harmony's own system turn has the
identity, the date, the reasoning effort and the channels. Messages are mappings or pydantic objects of any client
library. Every refusal is a ConversationError that names the message.
"""

from __future__ import annotations

import datetime
import itertools
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
from npu_gptoss.harmony.schemas import written_out

REASONING_EFFORTS = ("low", "medium", "high")
# what clients send -> what gpt-oss was trained on. `none` is refused: gpt-oss always reasons.
_EFFORTS = {effort: effort for effort in REASONING_EFFORTS} | {"minimal": "low", "xhigh": "high", "max": "high"}
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
FUNCTIONS = "functions."
# type of a content part -> its field that holds the text
TEXT_PARTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text", "summary_text"), "text")
TEXT_PARTS |= {"refusal": "refusal"}
# fields of an assistant's message with its reasoning: of vLLM, of gpt-oss's template, of OpenRouter, of LiteLLM
REASONING = ("reasoning_content", "reasoning", "thinking", "reasoning_details", "thinking_blocks")


class ConversationError(InputError):
    """A conversation that cannot be written in harmony. `param` is the field of the request, where there is one."""

    def __init__(self, message: str, param: str | None = "messages") -> None:
        super().__init__(message, field=param)
        self.param = param


def expected(path: str | None, what: str, got: object, hint: str = "") -> ConversationError:
    """The error for a value at `path` of the request. hint: what to do, as a sentence after a space."""
    return ConversationError(f"{path}: expected {what}, got {'null' if got is None else f'{got!r:.80}'}.{hint}", path)


def sequence(value: Any, path: str, what: str = "a list") -> Sequence[Any]:
    """The value, if it is a list; () for None. Raises ConversationError for another value."""
    if value is not None and (not isinstance(value, Sequence) or isinstance(value, str)):
        raise expected(path, what, value)
    return value or ()


def mapping(value: Any, path: str, what: str = "an object") -> Mapping[str, Any]:
    """The value, if it is an object; {} for None. Raises ConversationError for another value."""
    if value is not None and not isinstance(value, Mapping):
        raise expected(path, what, value)
    return value or {}


def text_field(fields: Mapping[str, Any], name: str, place: str) -> str:
    """The text in a field, which is not empty. Raises ConversationError for another value."""
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise expected(f"{place}.{name}", "a text", value)
    return value


def reasoning_effort(word: object, param: str = "reasoning_effort") -> str:
    """low, medium or high, the nearest to a word of OpenAI's; medium for None. Raises ConversationError for others."""
    if word is None:
        return "medium"
    if isinstance(word, str) and word in _EFFORTS:
        return _EFFORTS[word]
    raise expected(param, f"{', '.join(REASONING_EFFORTS)} (or minimal, xhigh and max, the nearest)", word)


def conversation(
    turns: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    effort: object = None,
    date: str | None = None,
    identity: str | None = None,
    instructions_in_system: bool = False,
) -> list[Message]:
    """Harmony messages of a conversation behind its system turn and the developer turn with its tools.

    tools: functions as in OpenAI's chat API. date: YYYY-MM-DD, default today. identity: in the place of "You are
    ChatGPT, …". instructions_in_system: the first instructions go to the system turn's identity (an option of vLLM's).
    """
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
        raise expected("date", f"a date like {today}", date) from None
    content = SystemContent.new().with_conversation_start_date(date)
    content.with_reasoning_effort(ReasoningEffort[reasoning_effort(effort).upper()])
    if identity or instructions:
        content.with_model_identity("\n".join(filter(None, (identity or content.model_identity, instructions))))
    return Message.from_role_and_content(Role.SYSTEM, content)


def developer_message(instructions: str | None, tools: Sequence[Mapping[str, Any]] = ()) -> Message:
    """A developer turn; it is empty, and `join_developer_turns` drops it, when there is neither.

    A function without arguments has no parameters: template and guide write `() => any` for it.
    """
    content = DeveloperContent.new()
    if instructions:
        content.with_instructions(instructions)
    described = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        about = function.get("description") or ""
        try:
            parameters = written_out(function.get("parameters") or {})
            shown = parameters if parameters.get("properties") or parameters.get("oneOf") else None
            described.append(ToolDescription.new(function["name"], about, shown))
        except (ValueError, TypeError, RecursionError, HarmonyError) as error:  # pydantic's own check, too
            place = f"tools[{number}]"
            raise ConversationError(f"{place} ({function['name']!r:.80}) cannot be written: {error}", place) from None
    if described:
        content.with_function_tools(described)
    return Message.from_role_and_content(Role.DEVELOPER, content)


def join_developer_turns(messages: Iterable[Message]) -> list[Message]:
    """One developer turn where several would follow each other, with all instructions and tools; none that is empty."""
    joined: list[Message] = []
    for is_developer, group in itertools.groupby(messages, lambda message: message.author.role is Role.DEVELOPER):
        if not is_developer:
            joined += group
            continue
        parts = [part for message in group for part in message.content]
        texts = [
            part.instructions if isinstance(part, DeveloperContent) else getattr(part, "text", "") for part in parts
        ]
        tools = {name: space for part in parts for name, space in (getattr(part, "tools", None) or {}).items()}
        if (text := "\n\n".join(filter(None, texts))) or tools:
            content = DeveloperContent(instructions=text or None, tools=tools or None)
            joined.append(Message.from_role_and_content(Role.DEVELOPER, content))
    return joined


Names = dict[str, list[str]]  # id of a call -> its function; those of all calls of a message that share an id


def chat_message(place: str, message: Any, names: Names) -> list[Message]:
    """The harmony messages of one message of a chat. place: its path in the request, for errors.

    `names` has the tool calls so far; an assistant message adds to it.
    """
    if isinstance(message, Message):
        return [message]
    fields = fields_of(message)
    role, content = fields.get("role"), fields.get("content")
    if content is None and role in ("system", "developer", "user"):
        raise expected(f"{place}.content", "a text or a list of text parts", None)
    if role in ("system", "developer"):
        return [developer_message(as_text(content, f"{place}.content"))]
    if role == "user":
        return [Message.from_role_and_content(Role.USER, as_text(content, f"{place}.content"))]
    if role == "assistant":
        return _assistant_messages(place, fields, names)
    if role == "function":  # deprecated: the function's name in the place of the id of its call
        return [tool_result(text_field(fields, "name", place), as_text(content, f"{place}.content"))]
    if role == "tool":
        name = name_of(names, str(fields.get("tool_call_id") or ""), fields.get("name")) or fields.get("name")
        if not isinstance(name, str) or not name:
            raise expected(
                f"{place}.tool_call_id",
                "the id of a call that an assistant message before it makes",
                fields.get("tool_call_id"),
                " Send the assistant's message with its tool_calls too.",
            )
        return [tool_result(name, as_text(content, f"{place}.content"))]
    raise expected(f"{place}.role", ", ".join(ROLES), role)


def name_of(names: Names, call_id: str, name: Any = None) -> str | None:
    """The function of a result's call. Calls that share an id have their results in order, or by name."""
    known = names.get(call_id, [None])
    return known.pop(known.index(name) if name in known else 0) if len(known) > 1 else known[0]


def _assistant_messages(place: str, fields: Mapping[str, Any], names: Names) -> list[Message]:
    content = fields.get("content")
    if content is None:
        content = fields.get("refusal")
        if fields.get("audio"):
            raise expected(f"{place}.audio", "the spoken text in content", fields["audio"])
    thought, text = reasoning_and_text(content, f"{place}.content")
    reasoning = reasoning_of(fields, place) or thought
    # the rendering leaves reasoning out once an answer has followed it
    turns = [said(reasoning, "analysis")] if reasoning else []
    calls = []
    for number, call in enumerate(map(fields_of, sequence(fields.get("tool_calls"), f"{place}.tool_calls"))):
        kind = "custom" if call.get("custom") else "function"
        calls.append((f"{place}.tool_calls[{number}].{kind}", call.get("id"), call.get(kind)))
    if (deprecated := fields.get("function_call")) is not None:
        calls.append((f"{place}.function_call", None, deprecated))
    if text or (content is not None and not calls and not thought):
        turns.append(said(text, "commentary" if calls else "final"))
    own: Names = {}
    for path, call_id, call in calls:
        function = fields_of(call)
        name = text_field(function, "name", path)
        own.setdefault(str(call_id or ""), []).append(name)
        turns.append(tool_call(name, call_arguments(function, path, path.endswith(".custom"))))
    names |= own
    return turns


def call_arguments(call: Mapping[str, Any], place: str, custom: bool) -> str:
    """The arguments of a call that a client sends back; a custom tool has an `input`."""
    kind = "input" if custom else "arguments"
    given = call.get(kind) or ""
    text = json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given
    if not isinstance(text, str):
        raise expected(f"{place}.{kind}", "a text", given)
    return custom_arguments(text) if custom else text


def custom_arguments(text: str) -> str:
    """The arguments of the function that replaces a custom tool; its input is one text."""
    return json.dumps({"input": text}, ensure_ascii=False)


def reasoning_of(fields: Mapping[str, Any], place: str) -> str:
    """The reasoning of an assistant's message by the field that has it; clients of other servers send back blocks."""
    name = next(filter(fields.get, REASONING), REASONING[0])
    return "\n".join(filter(None, reasoning_and_text(fields.get(name), f"{place}.{name}")))


def reasoning_and_text(content: Any, place: str) -> tuple[str, str]:
    """Parts like `thinking` and `reasoning.text`, which clients of other servers send back, are reasoning."""
    if not isinstance(content, Sequence) or isinstance(content, str):
        return "", as_text(content, place)
    thoughts, rest = [], []
    for part in content:
        fields = fields_of(part)
        if str(fields.get("type")).startswith(("thinking", "reasoning")):
            given = next(filter(None, map(fields.get, ("thinking", "text", "content", "summary"))), None)
            thoughts.append(as_text([given] if isinstance(given, Mapping) else given, place))
        elif fields.get("type") != "redacted_thinking":
            rest.append(part)
    return "\n".join(filter(None, thoughts)), as_text(rest, place)


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
        raise expected(place, "a text or a list of text parts", content)
    texts = []
    for number, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        fields, path = fields_of(part), f"{place}[{number}]"
        kind = fields.get("type", "text")
        if kind not in TEXT_PARTS or ("type" not in fields and "text" not in fields):
            got = {"type": fields.get("type") or next(iter(fields), None)}
            raise expected(path, "a part of text, which is all that gpt-oss reads", got)
        text = fields.get(TEXT_PARTS[kind]) or ""
        if not isinstance(text, str):
            raise expected(f"{path}.text", "a text", text)
        texts.append(text)
    return "".join(texts)


def without_old_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Reasoning is dropped once an answer has followed it; until then, between tool calls, the model reads it.

    openai-harmony drops only reasoning before the first answer; the guide and the published template mean every one.
    """
    last = max((number for number, message in enumerate(messages) if message.channel == "final"), default=-1)
    return [m for number, m in enumerate(messages) if number > last or m.channel != "analysis"]


def steps(turns: Sequence[Message]) -> list[list[int]]:
    """Numbers of the turns that a shortened conversation keeps or drops together, oldest first: turns of the assistant
    in a row with the results of their calls, else each turn alone."""
    found: list[list[int]] = []
    calls: dict[str | None, list[int]] = {}  # function -> the step that called it last
    for number, turn in enumerate(turns):
        author = turn.author
        if author.role is Role.TOOL and author.name in calls:
            calls[author.name].append(number)
            continue
        if author.role is Role.ASSISTANT and number and turns[number - 1].author.role is Role.ASSISTANT:
            found[-1].append(number)
        else:
            found.append([number])
        if author.role is Role.ASSISTANT and turn.recipient is not None:
            calls[turn.recipient] = found[-1]
    return found


def _function(name: str) -> str:
    return FUNCTIONS + name.removeprefix(FUNCTIONS)


def fields_of(value: Any) -> Mapping[str, Any]:
    """A message, a part or a tool as a mapping; an empty one when it is none."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_none=True)
    return value if isinstance(value, Mapping) else {}
