"""Converts the conversation of a /v1/messages request, which has blocks of many types, to harmony's messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openai_harmony import Message, Role

from npu_gptoss.frontend.tools import UNREADABLE
from npu_gptoss.harmony.conversation import (
    Names,
    developer_message,
    expected,
    fields_of,
    name_of,
    said,
    text_field,
    tool_call,
    tool_result,
)

# Claude Code's first block of `system`. It contains a number that changes with each request, which would defeat the
# prefix cache.
BILLING = "x-anthropic-billing-header"
# Blocks about tools that Anthropic's servers ran, and others without content for the model
HOSTED_BLOCKS = {"server_tool_use", "mcp_tool_use", "mcp_tool_listing", "container_upload", "browser_state"}
SILENT_BLOCKS = {"redacted_thinking", "fallback"}
TOOL_CHANGES = {"tool_addition", "tool_removal"}
# Anthropic's documentation makes clients send a call's input back within this key if it is no JSON object. A whole
# answer uses it here too: the text is kept, and no tool runs with half of its input.
INVALID_JSON = "INVALID_JSON"


def conversation(body: Mapping[str, Any], warnings: list[str]) -> tuple[list[Message], tuple[str, str] | None]:
    """Returns the turns, and channel and text of a last message of the assistant, which the model continues."""
    messages = [fields_of(message) for message in body["messages"]]
    last_of_user = max((n for n, message in enumerate(messages) if message.get("role") == "user"), default=-1)
    turns, names = _instructions(body.get("system"), "system", warnings), {}
    for number, message in enumerate(messages):
        place, role, content = f"messages[{number}]", message.get("role"), message.get("content")
        if role in ("system", "developer"):
            if message.get("clear_at") != "next_user_message" or number > last_of_user:
                turns += _instructions(content, f"{place}.content", warnings)
        elif role == "assistant" and number == len(messages) - 1:
            thought, continued = _continued(content, f"{place}.content")
            return turns + thought, continued
        elif role in ("user", "assistant"):
            turns += _turns(role, content, f"{place}.content", names, warnings)
        else:
            raise expected(f"{place}.role", "user, assistant or system", role)
    return turns, None


def _instructions(content: Any, place: str, warnings: list[str]) -> list[Message]:
    if content is None:
        return []
    blocks = [one for one in _blocks(content, place, warnings) if one[1].get("type") not in TOOL_CHANGES]
    texts = [_text(block, path) for path, block in blocks]
    return [developer_message("\n\n".join(text for text in texts if text and not text.startswith(BILLING)))]


def _blocks(content: Any, place: str, warnings: list[str]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the blocks of a content with their paths, without blocks that have no content for the model."""
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, Sequence):
        raise expected(place, "a text or a list of blocks", content)
    blocks = []
    for number, block in enumerate(content):
        path = f"{place}[{number}]"
        fields = {"type": "text", "text": block} if isinstance(block, str) else fields_of(block)
        kind = fields.get("type")
        if kind in HOSTED_BLOCKS or (isinstance(kind, str) and kind.endswith("_tool_result")):
            warnings.append(f"{path} is left out: gpt-oss reads no block of type {kind:.80}")
        elif kind not in SILENT_BLOCKS:
            blocks.append((path, fields))
    return blocks


def _turns(role: str, content: Any, place: str, names: Names, warnings: list[str]) -> list[Message]:
    """Converts a message to harmony messages. `names` has the tool_use blocks so far, and gets those of the message."""
    own: Names = {}
    blocks = _blocks(content, place, warnings)
    channel = "commentary" if any(block.get("type") == "tool_use" for _, block in blocks) else "final"
    turns: list[Message] = []
    texts: list[str] = []  # of consecutive blocks

    def end_text(always: bool = False) -> None:
        text = "".join(texts)
        texts.clear()
        if text or always:
            user = role == "user"
            turns.append(Message.from_role_and_content(Role.USER, text) if user else said(text, channel))

    for path, block in blocks:
        kind = block.get("type")
        if kind not in ("thinking", "tool_use", "tool_result"):
            texts.append(_text(block, path))
            continue
        end_text()
        if kind == "tool_use":
            turns.append(_call(block, path, own))
        elif kind == "tool_result":
            turns.append(_result(block, path, names, warnings))
        elif thought := _field(block, "thinking", path):
            turns.append(said(thought, "analysis"))
    names |= own
    end_text(always=not turns and all(block.get("type") == "text" for _, block in blocks))
    return turns


def _continued(content: Any, place: str) -> tuple[list[Message], tuple[str, str] | None]:
    """Returns the reasoning before a last message that the model continues, and that message's channel and text."""
    thoughts, text = [], ""
    for path, block in _blocks(content, place, []):
        kind = block.get("type")
        if kind == "thinking" and not text:
            thoughts.append(_field(block, "thinking", path))
        elif kind == "text":
            text += _text(block, path)
        else:
            what = "a block of text, because the model continues a last message of the assistant"
            raise expected(path, what, kind, " End messages with one of the user.")
    thought = "\n".join(filter(None, thoughts))
    if text:
        return [said(thought, "analysis")] if thought else [], ("final", text)
    return [], ("analysis", thought) if thought else None


def _call(block: Mapping[str, Any], path: str, names: Names) -> Message:
    name, given = text_field(block, "name", path), block.get("input")
    if isinstance(given, Mapping):
        raw = given.get(INVALID_JSON) if len(given) == 1 else None
        # Without spaces, as the model writes it, so that the prefix cache matches
        given = raw if isinstance(raw, str) else json.dumps(given, ensure_ascii=False, separators=(",", ":"))
    if given is not None and not isinstance(given, str):
        raise expected(f"{path}.input", "an object", given)
    if isinstance(block.get("id"), str):
        names.setdefault(block["id"], []).append(name)
    return tool_call(name, given or "{}")


def _result(block: Mapping[str, Any], path: str, names: Names, warnings: list[str]) -> Message:
    given, content = block.get("tool_use_id"), block.get("content")
    name = name_of(names, given) if isinstance(given, str) else None
    if name is None:
        raise expected(f"{path}.tool_use_id", "the id of a tool_use block in an assistant message before it", given)
    blocks = [] if content is None else _blocks(content, f"{path}.content", warnings)
    text = "\n".join(_text_of_result(one, place, warnings) for place, one in blocks)
    if block.get("is_error") and not text.lower().startswith(("error", "<tool_use_error>")):
        text = f"Error: {text}"
    return tool_result(name, text)


def _text_of_result(block: Mapping[str, Any], path: str, warnings: list[str]) -> str:
    """Returns the text of a block of a tool's result; a sentence if the block is no text."""
    kind = block.get("type")
    is_data = kind != "document" or fields_of(block.get("source")).get("type") not in ("text", "content")
    if kind not in UNREADABLE or not is_data:
        return _text(block, path)
    warnings.append(f"{path} is left out: gpt-oss reads no block of type {kind}")
    return UNREADABLE[kind]


def _field(block: Mapping[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise expected(f"{path}.{name}", "a text", value)
    return value


def _text(block: Mapping[str, Any], path: str) -> str:
    """Returns the text of any block with text. Raises ConversationError for all other blocks."""
    kind = block.get("type")
    if kind == "text":
        return _field(block, "text", path)
    if kind == "compaction":  # a summary of the earlier conversation
        return block["content"] if isinstance(block.get("content"), str) else ""
    if kind == "tool_reference":
        name = block.get("tool_name") or block.get("name")
        return f"The tool {name} is available." if isinstance(name, str) else ""
    if kind == "search_result":
        return _titled(block, ("title", "source"), block.get("content"), f"{path}.content")
    source = fields_of(block.get("source"))
    if kind == "document" and source.get("type") in ("text", "content"):
        name = "data" if source["type"] == "text" else "content"
        return _titled(block, ("title", "context"), source.get(name), f"{path}.source.{name}")
    got = {"type": kind, "source": {"type": source.get("type")}} if source else {"type": kind}
    raise expected(path, "a block of text, which is all that gpt-oss reads", got)


def _titled(block: Mapping[str, Any], titles: Sequence[str], content: Any, place: str) -> str:
    texts = [_text(one, path) for path, one in _blocks(content, place, [])]
    return "\n".join([block[name] for name in titles if isinstance(block.get(name), str)] + texts)
