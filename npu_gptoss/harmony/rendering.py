"""Renders harmony messages as text pieces and control tokens, like openai-harmony.

openai-harmony gives token ids only, and its tokenizer needs the square of the length of a run of equal characters. So
the framing is written here, and tests hold it against the library. The text of tools (the TypeScript of a JSON
schema) comes from the library, which never sees a long text: each is replaced by a short mark first, and put in
afterwards.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from openai_harmony import (
    DeveloperContent,
    HarmonyEncoding,
    HarmonyError,
    Message,
    Role,
    SystemContent,
    TextContent,
    ToolNamespaceConfig,
)

from npu_gptoss.harmony.conversation import ConversationError, without_old_reasoning
from npu_gptoss.harmony.vocabulary import SPECIAL_IDS

# The special tokens of the harmony guide
CONTROL_NAMES = ("return", "constrain", "channel", "start", "end", "message", "call")
CONTROL = {f"<|{name}|>": SPECIAL_IDS[name] for name in CONTROL_NAMES}
START, MESSAGE, CHANNEL, END, CALL = (CONTROL[f"<|{name}|>"] for name in ("start", "message", "channel", "end", "call"))
CONSTRAIN = "<|constrain|>"
LONGEST_SHOWN = 64  # characters of a text in a tool that the library sees as it is
FUNCTIONS_NOTE = "\nCalls to these tools must go to the commentary channel: 'functions'."


def pieces(messages: Sequence[Message], library: HarmonyEncoding) -> list[int | str]:
    """Control tokens as ids, everything else as text that must be encoded without special tokens, each piece alone."""
    kept = without_old_reasoning(messages)
    contents = [part for message in kept for part in message.content if isinstance(part, DeveloperContent)]
    functions = any(part.tools and "functions" in part.tools and part.tools["functions"].tools for part in contents)
    written: list[int | str] = []
    for message in kept:
        written += _header(message)
        written += [_content(part, functions, library) for part in message.content]
        is_call = message.author.role is Role.ASSISTANT and message.recipient is not None
        written.append(CALL if is_call else END)
    return [*written, START, Role.ASSISTANT.value]


def _header(message: Message) -> list[int | str]:
    author = message.author
    if author.role is Role.TOOL and not author.name:
        raise ConversationError("a tool's message needs the tool's name")
    header: list[int | str] = [START, author.name if author.role is Role.TOOL else author.role.value]
    if author.name and author.role is not Role.TOOL:
        header.append(f":{author.name}")
    if message.recipient is not None and message.recipient != "all":
        header.append(f" to={message.recipient}")
    if message.channel is not None:
        header += [CHANNEL, message.channel]
    if message.content_type is not None:
        if message.content_type.startswith(CONSTRAIN):
            header += [" ", CONTROL[CONSTRAIN], message.content_type.removeprefix(CONSTRAIN)]
        else:
            header.append(f" {message.content_type}")
    return [*header, MESSAGE]


def _content(part: Any, functions: bool, library: HarmonyEncoding) -> str:
    if isinstance(part, SystemContent):
        return _system(part, functions, library)
    if isinstance(part, DeveloperContent):
        sections = [] if part.instructions is None else ["# Instructions", part.instructions]
        if part.tools:
            sections.append(tools_section(part.tools, library))
        return "\n\n".join(sections)
    if isinstance(part, TextContent):
        return part.text
    raise ConversationError(f"nothing renders a content of type {type(part).__name__}")


def _system(content: SystemContent, functions: bool, library: HarmonyEncoding) -> str:
    top = [
        content.model_identity,
        content.knowledge_cutoff and f"Knowledge cutoff: {content.knowledge_cutoff}",
        content.conversation_start_date and f"Current date: {content.conversation_start_date}",
    ]
    sections = ["\n".join(filter(None, top))]
    if content.reasoning_effort is not None:
        sections.append(f"Reasoning: {content.reasoning_effort.value.lower()}")
    if content.tools:
        sections.append(tools_section(content.tools, library))
    channels = content.channel_config
    if channels is not None and channels.valid_channels:
        line = f"# Valid channels: {', '.join(channels.valid_channels)}."
        line += " Channel must be included for every message." if channels.channel_required else ""
        sections.append(line + (FUNCTIONS_NOTE if functions else ""))
    return "\n\n".join(filter(None, sections))


def tools_section(tools: Mapping[str, ToolNamespaceConfig], library: HarmonyEncoding) -> str:
    """`# Tools` with its namespaces, as openai-harmony writes it. Raises ConversationError for tools that the library
    refuses."""
    marks = _Marks()
    try:
        shortened = {
            name: space.model_copy(update={"tools": [marks.shortened_tool(tool) for tool in space.tools]})
            for name, space in tools.items()
        }
        message = Message.from_role_and_content(Role.DEVELOPER, DeveloperContent(tools=shortened))
        ids = library.render(message)
        return marks.restored(library.decode_utf8(ids[ids.index(MESSAGE) + 1 : -1]))
    except (ValueError, HarmonyError, RecursionError) as error:
        raise ConversationError(f"the tools cannot be written in harmony: {error}", "tools") from error


_MARK = re.compile("\ue000([0-9a-f]{8})([0-9]+)(?:null)?\ue001")  # the nonce, the text's number


class _Marks:
    """Marks that replace long texts: private characters around a number that no client can guess."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(4)
        self._texts: list[str] = []
        self._numbers: dict[str, str] = {}

    def shortened_tool(self, tool: Any) -> Any:
        changes: dict[str, Any] = {"name": self._mark(tool.name)}
        if len(tool.description) > LONGEST_SHOWN:  # the library comments each of its lines out
            lines = re.split(r"\r?\n", tool.description)
            changes["description"] = self._mark("\n// ".join(lines if lines[-1] else lines[:-1]), always=True)
        if tool.parameters is not None:
            changes["parameters"] = self._shortened(tool.parameters)
        return tool.model_copy(update=changes)

    def _shortened(self, value: Any, names: bool = False, as_json: bool = False) -> Any:
        """names: the keys are names of properties; as_json: the library writes the value as JSON."""
        if isinstance(value, str):
            return self._mark(value, as_json=as_json)
        if isinstance(value, list):
            return [self._shortened(entry, as_json=as_json) for entry in value]
        if not isinstance(value, Mapping):
            return value
        return {
            self._mark(key, as_json=as_json): self._shortened(
                entry,
                names=key == "properties" and not names,
                as_json=as_json or (key == "default" and not names and not isinstance(entry, str)),
            )
            for key, entry in value.items()
        }

    def _mark(self, text: str, always: bool = False, as_json: bool = False) -> str:
        if len(text) <= LONGEST_SHOWN and not always:
            return text
        if as_json:
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        if text not in self._numbers:  # equal texts stay equal: the library compares some
            null = "null" if "null" in text else ""  # and looks for this word
            self._numbers[text] = f"\ue000{self._nonce}{len(self._texts)}{null}\ue001"
            self._texts.append(text)
        return self._numbers[text]

    def restored(self, text: str) -> str:
        return _MARK.sub(lambda found: self._texts[int(found[2])] if found[1] == self._nonce else found[0], text)
