"""Renders the chats of the tiny trained checkpoint as harmony text, with the variations of servers, for its training.

Servers and the engine use `npu_gptoss/harmony` instead. Tests compare the default style with it, and every style with
openai-harmony, token for token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Message = Mapping[str, Any]  # one message of an OpenAI chat request

STOPS = ("<|return|>", "<|call|>", "<|endoftext|>")
_TYPES = {"integer": "number", "number": "number", "string": "string", "boolean": "boolean"}


@dataclass(frozen=True)
class Style:
    """A server's choices where the format leaves some. The default is that of `npu_gptoss.harmony`."""

    date: str = "2026-01-02"
    empty_developer: bool = False  # stock vLLM 0.11.0 writes a developer turn that says nothing
    commentary: bool = True  # is `commentary` among the valid channels? vLLM 0.11.0 leaves it out in chat requests
    tool_author: str = "functions.{name} to=assistant"  # stock vLLM 0.11.0 writes `functions.`
    final_channel: bool = True  # do earlier answers carry their channel? vLLM 0.11.0 drops it


@dataclass(frozen=True)
class Reply:
    """An assistant's reply: `content` is the final channel; a function call has `call_name` and `call_arguments`."""

    analysis: str = ""
    content: str = ""
    call_name: str = ""
    call_arguments: str = ""


def render_prompt(
    messages: Sequence[Message],
    tools: Sequence[Message] = (),
    reasoning_effort: str = "medium",
    style: Style | None = None,
) -> str:
    """Renders the prompt up to and including `<|start|>assistant`. A first system message becomes the developer's."""
    style = style or Style()
    channels = "analysis, commentary, final" if style.commentary else "analysis, final"
    text = (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        f"Knowledge cutoff: 2024-06\nCurrent date: {style.date}\n\nReasoning: {reasoning_effort}\n\n"
        f"# Valid channels: {channels}. Channel must be included for every message."
    )
    if tools:
        text += "\nCalls to these tools must go to the commentary channel: 'functions'."
    text += "<|end|>"
    instructions = ""
    if messages and messages[0]["role"] in ("system", "developer"):
        instructions, messages = messages[0]["content"], messages[1:]
    sections = ([f"# Instructions\n\n{instructions}"] if instructions else []) + (
        [render_tools(tools)] if tools else []
    )
    if sections or style.empty_developer:
        text += "<|start|>developer<|message|>" + "\n\n".join(sections) + "<|end|>"
    called = ""
    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            text += f"<|start|>{style.tool_author.format(name=called)}<|channel|>commentary<|message|>{content}<|end|>"
        elif message.get("tool_calls"):
            for call in message["tool_calls"]:
                called = call["function"]["name"]
                arguments = call["function"]["arguments"]
                text += (
                    f"<|start|>assistant to=functions.{called}<|channel|>commentary json<|message|>{arguments}<|call|>"
                )
        elif role == "assistant" and style.final_channel:
            text += f"<|start|>assistant<|channel|>final<|message|>{content}<|end|>"
        else:
            text += f"<|start|>{role}<|message|>{content}<|end|>"
    return text + "<|start|>assistant"


def render_tools(tools: Sequence[Message]) -> str:
    """Renders the `# Tools` section: a TypeScript type for each function."""
    text = "# Tools\n\n## functions\n\nnamespace functions {\n\n"
    for tool in tools:
        function = tool.get("function", tool)
        schema = function.get("parameters") or {}
        text += f"// {function['description']}\ntype {function['name']} = "
        if not schema.get("properties"):
            text += "() => any;\n\n"
            continue
        text += "(_: {\n"
        for name, field in schema["properties"].items():
            if "description" in field:
                text += f"// {field['description']}\n"
            optional = "" if name in schema.get("required", ()) else "?"
            text += f"{name}{optional}: {_type_of(field)},\n"
        text += "}) => any;\n\n"
    return text + "} // namespace functions"


def _type_of(field: Message) -> str:
    if "enum" in field:
        return " | ".join(json.dumps(value) for value in field["enum"])
    return _TYPES.get(field.get("type", ""), "any")


def render_reply(reply: Reply) -> str:
    """Renders the text that a model generates after `<|start|>assistant`, including the stop token."""
    text = f"<|channel|>analysis<|message|>{reply.analysis}<|end|><|start|>assistant"
    if reply.call_name:
        call = f"<|channel|>commentary to=functions.{reply.call_name} <|constrain|>json<|message|>"
        return f"{text}{call}{reply.call_arguments}<|call|>"
    return f"{text}<|channel|>final<|message|>{reply.content}<|return|>"


def parse_reply(text: str) -> Reply:
    """Parses any generated text, the reverse of `render_reply`. Missing parts stay empty."""
    analysis = content = call_name = call_arguments = ""
    for part in text.split("<|start|>assistant"):
        header, found, body = part.partition("<|message|>")
        if not found:
            continue
        body = re.split(r"<\|(?:end|return|call|endoftext)\|>", body)[0]
        recipient = re.search(r"to=functions\.(\w+)", header)
        if recipient:
            call_name, call_arguments = recipient[1], body
        elif "<|channel|>final" in header:
            content = body
        elif "<|channel|>analysis" in header:
            analysis = body
    return Reply(analysis, content, call_name, call_arguments)
