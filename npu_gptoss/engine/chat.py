"""harmony, gpt-oss's chat format, through openai-harmony: messages to token ids, generated ids back to channels.

Messages are those of OpenAI's chat API. The text of system and developer messages becomes harmony's developer
instructions, as OpenAI's own servers do it; harmony's system turn carries the reasoning effort and the date.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai_harmony as harmony

from npu_gptoss.errors import InputError
from npu_gptoss.model.vocabulary import BASE_VARIABLE, find_vocabulary

REASONING_EFFORTS = ("low", "medium", "high")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_FUNCTIONS = "functions."


class ChatError(InputError):
    """A conversation that cannot be rendered, or a vocabulary that openai-harmony cannot load."""


@dataclass(frozen=True)
class Turn:
    """A message that the model wrote. channel: analysis, commentary or final; recipient: as `functions.name`."""

    channel: str | None
    recipient: str | None
    text: str


@dataclass(frozen=True)
class Reply:
    """What the model wrote. `error` says where it left the format, if it did; `turns` holds what came before."""

    turns: tuple[Turn, ...]
    error: str | None = None


class Chat:
    """The harmony encoding for a model directory."""

    def __init__(self, model_dir: Path) -> None:
        self._encoding = _load_encoding(model_dir)
        self.stop_token_ids = tuple(self._encoding.stop_tokens_for_assistant_actions())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_effort: str = "medium",
        date: str | None = None,
    ) -> list[int]:
        """Token ids up to and with `<|start|>assistant`. tools as in OpenAI's API; date YYYY-MM-DD, default today."""
        if reasoning_effort not in REASONING_EFFORTS:
            raise ChatError(f"reasoning_effort must be {', '.join(REASONING_EFFORTS)}, got {reasoning_effort!r}")
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise ChatError(f"messages must be a list of at least one message, got {messages!r:.80}")
        if not isinstance(tools, Sequence) or isinstance(tools, str):
            raise ChatError(f"tools must be a list, got {tools!r:.80}")
        for number, message in enumerate(messages):
            role = message.get("role") if isinstance(message, Mapping) else None
            if role not in _ROLES:
                raise ChatError(f"message {number} needs a role of {', '.join(_ROLES)}, got {message!r:.80}")
        try:
            conversation = _conversation(messages, tools, reasoning_effort, date)
            return self._encoding.render_conversation_for_completion(conversation, harmony.Role.ASSISTANT)
        except ChatError:
            raise
        except (ValueError, harmony.HarmonyError) as error:  # pydantic's and the binding's own checks
            raise ChatError(f"the conversation cannot be written in harmony: {error}") from error

    def parse(self, token_ids: Sequence[int]) -> Reply:
        """Generated ids, with or without their stop token; an unfinished last message counts."""
        parser = harmony.StreamableParser(self._encoding, harmony.Role.ASSISTANT)
        error = None
        for number, token in enumerate(token_ids):
            try:
                parser.process(token)
            except harmony.HarmonyError as problem:
                error = f"token {number}: {problem}"
                break
        turns = [
            Turn(m.channel, m.recipient, "".join(getattr(part, "text", "") for part in m.content))
            for m in parser.messages
        ]
        if parser.state == harmony.StreamState.CONTENT:
            turns.append(Turn(parser.current_channel, parser.current_recipient, parser.current_content))
        elif error is None and parser.state == harmony.StreamState.HEADER and token_ids:
            error = "the last message ends within its header"
        return Reply(tuple(turns), error)


def _load_encoding(model_dir: Path) -> harmony.HarmonyEncoding:
    # openai-harmony reads the folder from the environment and would else go to the network
    if not os.environ.get(BASE_VARIABLE) and (directory := find_vocabulary(model_dir)):
        os.environ[BASE_VARIABLE] = str(directory)
    try:
        return _encoding()
    except Exception as error:  # the binding raises bare exceptions, a missing vocabulary among them
        raise ChatError(
            f"openai-harmony cannot load its vocabulary ({error}): run `npu-gptoss vocabulary {model_dir}`, which "
            "rebuilds it from the checkpoint without a network"
        ) from error


@functools.cache
def _encoding() -> harmony.HarmonyEncoding:
    return harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def _conversation(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], reasoning_effort: str, date: str | None
) -> harmony.Conversation:
    leading = next((i for i, m in enumerate(messages) if m["role"] not in ("system", "developer")), len(messages))
    instructions = [_text(number, message) for number, message in enumerate(messages[:leading])]
    turns = [_system(reasoning_effort, date)]
    if any(instructions) or tools:
        turns.append(_developer("\n\n".join(filter(None, instructions)), tools))
    names: dict[str, str] = {}  # tool call id -> function
    for number, message in enumerate(messages[leading:], start=leading):
        turns += _turns(number, message, names)
    return harmony.Conversation.from_messages(turns)


def _system(reasoning_effort: str, date: str | None) -> harmony.Message:
    today = datetime.date.today().isoformat()
    try:
        date = today if date is None else datetime.date.fromisoformat(date).isoformat()
    except (TypeError, ValueError):
        raise ChatError(f"the date must be written like {today}, got {date!r}") from None
    content = (
        harmony.SystemContent.new()
        .with_reasoning_effort(harmony.ReasoningEffort[reasoning_effort.upper()])
        .with_conversation_start_date(date)
    )
    return harmony.Message.from_role_and_content(harmony.Role.SYSTEM, content)


def _developer(instructions: str, tools: Sequence[Mapping[str, Any]]) -> harmony.Message:
    content = harmony.DeveloperContent.new()
    if instructions:
        content = content.with_instructions(instructions)
    if tools:
        content = content.with_function_tools([_tool(number, tool) for number, tool in enumerate(tools)])
    return harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, content)


def _tool(number: int, tool: Mapping[str, Any]) -> harmony.ToolDescription:
    function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ChatError(f'tool {number} must be {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.80}')
    return harmony.ToolDescription.new(function["name"], function.get("description") or "", function.get("parameters"))


def _turns(number: int, message: Mapping[str, Any], names: dict[str, str]) -> list[harmony.Message]:
    """One message of OpenAI's API as harmony's; `names` collects the tool calls that later results refer to."""
    role = message["role"]
    if role in ("system", "developer"):
        return [_developer(_text(number, message), ())]
    if role == "user":
        return [harmony.Message.from_role_and_content(harmony.Role.USER, _text(number, message))]
    if role == "tool":
        name = message.get("name") or names.get(message.get("tool_call_id", ""))
        if not isinstance(name, str):
            raise ChatError(f"message {number}: a tool's result needs the tool_call_id of an earlier call, or a name")
        author = harmony.Author.new(harmony.Role.TOOL, _FUNCTIONS + name.removeprefix(_FUNCTIONS))
        result = harmony.Message.from_author_and_content(author, _text(number, message))
        return [result.with_recipient("assistant").with_channel("commentary")]
    return _assistant(number, message, names)


def _assistant(number: int, message: Mapping[str, Any], names: dict[str, str]) -> list[harmony.Message]:
    def said(text: str, channel: str) -> harmony.Message:
        return harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text).with_channel(channel)

    calls = message.get("tool_calls") or []
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    turns = [said(reasoning, "analysis")] if isinstance(reasoning, str) else []
    if message.get("content") or not calls:
        turns.append(said(_text(number, message), "commentary" if calls else "final"))
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not all(
            isinstance(function.get(k), str) for k in ("name", "arguments")
        ):
            raise ChatError(
                f"message {number}: a tool call needs a function with name and arguments as texts, got {call!r:.80}"
            )
        names[call.get("id", "")] = function["name"]
        turn = said(function["arguments"], "commentary").with_recipient(_FUNCTIONS + function["name"])
        turns.append(turn.with_content_type("<|constrain|>json"))
    return turns


def _text(number: int, message: Mapping[str, Any]) -> str:
    """`content` as one text; OpenAI's API also allows a list of text parts."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    if not parts or len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ChatError(
            f"message {number} ({message['role']}): content must be a text or a list of text parts, got {content!r:.80}"
        )
    return "".join(texts)
