"""Anthropic's tools: reads those of a request of /v1/messages, and the changes that its messages make to them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from npu_gptoss.frontend.message_blocks import TOOL_CHANGES
from npu_gptoss.frontend.request import typed
from npu_gptoss.frontend.tools import Tools, is_hosted, read_tools
from npu_gptoss.harmony.conversation import expected, fields_of, sequence

CHOICES = {"auto": "auto", "any": "required", "none": "none", "tool": "function"}
# Anthropic's own tools have a date: bash_20250124, tool_search_tool_bm25_20251119; the latter also without
_OWN = re.compile(r"\w+_\d{8}|mcp_toolset|tool_search_tool_\w+")
# Placeholder for a tool that is left out, so that later tools keep their numbers
_NO_TOOL = {"type": "namespace", "name": "left_out", "tools": ()}


def tools_of(body: Mapping[str, Any], warnings: list[str]) -> Tools:
    """Returns the request's tools, in the state that its last message left. Raises ConversationError."""
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
    return read_tools(functions, wanted, parallel=not typed(choice, "tool_choice.").get("disable_parallel_tool_use"))


def _function(tool: Any, place: str, warnings: list[str]) -> Any:
    """Converts a tool to the form of /v1/responses, which `read_tools` reads."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    if isinstance(tool, Mapping) and kind in (None, "custom"):
        schema = tool.get("input_schema")
        if not isinstance(schema, Mapping):
            raise expected(f"{place}.input_schema", "a JSON schema", schema)
        own = {name: tool.get(name) for name in ("name", "description", "strict")}
        return {"type": "function", **own, "parameters": schema}
    if is_hosted(kind) or (isinstance(kind, str) and _OWN.fullmatch(kind)):
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
