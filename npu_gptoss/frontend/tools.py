"""Tools of a request: the functions that the model is offered, and their calls in the form of the API.

gpt-oss calls functions. A function is offered unchanged. A `custom` tool is offered as a function of one string,
`input`. The functions of a `namespace` are offered as `NAMESPACE__FUNCTION` and returned with their namespace. A
`tool_search` that the client runs is a function of that name. Hosted tools, which OpenAI's or Anthropic's own servers
run, and tools that only their models know (`local_shell`, …) are left out with a warning, because agents send them with
their functions in every request. A request that forces one is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from npu_gptoss.harmony.conversation import ConversationError, expected, fields_of, mapping, sequence

HOSTED = {
    *("web_search", "web_search_preview", "file_search", "code_interpreter", "image_generation", "tool_search", "mcp"),
    *("computer", "computer_use", "computer_use_preview", "local_shell", "shell", "apply_patch"),
    *("browser_search", "x_search", "container", "programmatic", "programmatic_tool_calling"),
}
# Anthropic's have a date: bash_20250124, web_search_20250305
_ANTHROPIC = ("bash", "text_editor", "str_replace_editor", "memory", "web_fetch", "code_execution", "advisor")
OTHER_SCHEMAS = {"input_schema", "inputSchema"}  # of Anthropic's tools and MCP's
SEPARATOR = "__"
SEARCH = "tool_search"
OWN_NAMESPACE = "functions"  # harmony's, in which all functions are: Codex spells it out
# type of a part of a tool's result -> the text in its place, so that a picture does not end an agent's conversation
UNREADABLE = {
    kind: f"({what}, which this model cannot read)"
    for what, kinds in {
        "an image": ("image", "input_image", "image_url"),
        "a document": ("document", "file", "input_file"),
        "a sound": ("audio", "input_audio"),
    }.items()
    for kind in kinds
}

Json = Mapping[str, Any]


@dataclass(frozen=True)
class Tool:
    """One function that the model is offered.

    name: as the model calls it. own_name and namespace: as the client calls it. place: its path in the request.
    """

    name: str
    own_name: str
    place: str
    kind: Literal["function", "custom", "tool_search"] = "function"
    namespace: str | None = None
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    format: Json | None = None  # the grammar of a custom tool's input

    @property
    def function(self) -> dict[str, Any]:
        """Returns the function as OpenAI's chat API has it."""
        own = {"name": self.name, "description": self.description, "parameters": self.parameters, "strict": self.strict}
        return {"type": "function", "function": {name: value for name, value in own.items() if value is not None}}


@dataclass(frozen=True)
class Choice:
    """A `tool_choice`. tool: the one that must be called, if mode is "function"."""

    mode: Literal["auto", "none", "required", "function"] = "auto"
    tool: Tool | None = None


@dataclass(frozen=True)
class Tools:
    """The tools of a request that the model may see. warnings: a sentence for each tool that is left out."""

    offered: tuple[Tool, ...] = ()
    choice: Choice = field(default_factory=Choice)
    parallel: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.name for tool in self.offered)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Returns the functions for the prompt: none if no tool may be called."""
        return [] if self.choice.mode == "none" else [tool.function for tool in self.offered]

    def loosened(self, change: Callable[[Json | None], Json | None]) -> Tools:
        """Returns the tools with changed schemas, except strict ones of which one must be called."""

        def loose(tool: Tool) -> Tool:
            kept = tool.kind == "custom" or (tool.strict and self.choice.mode != "auto")
            parameters = tool.parameters if kept else change(tool.parameters)
            return replace(tool, parameters=parameters, strict=tool.strict if parameters else None)

        forced = self.choice.tool and loose(self.choice.tool)
        return replace(self, offered=tuple(map(loose, self.offered)), choice=replace(self.choice, tool=forced))

    @property
    def characters(self) -> int:
        """Returns the approximate length of the tools in a prompt."""
        return sum(len(repr(tool.parameters)) + len(tool.description or "") for tool in self.offered)

    def called(self, name: str) -> Tool:
        """Returns the tool of a call; a plain function if the model calls a name that is not offered."""
        return next((tool for tool in self.offered if tool.name == name), Tool(name, name, "tools"))

    def flat_name(self, name: str, namespace: str | None = None) -> str:
        """Returns the model's name for a function that the client names."""
        if namespace:
            return _joined(namespace, name)
        found = [tool.name for tool in self.offered if tool.own_name == name]
        return found[0] if found else name


def _joined(namespace: str, name: str) -> str:
    if namespace == OWN_NAMESPACE:
        return name
    return name if name.startswith(namespace) else f"{namespace.removesuffix(SEPARATOR)}{SEPARATOR}{name}"


def readable(content: Any, place: str, warnings: list[str]) -> Any:
    """Returns a tool's result with a sentence in place of each part that is no text. Adds a warning for each."""
    if not isinstance(content, list):
        return content
    parts = []
    for number, part in enumerate(content):
        kind = fields_of(part).get("type")
        if kind in UNREADABLE:
            warnings.append(f"{place}[{number}] is left out: gpt-oss reads no part of type {kind}")
            part = UNREADABLE[kind]
        parts.append(part)
    return parts


def custom_input(arguments: str) -> str:
    """Returns a custom tool's input from the model's arguments, which may be the input without its object, have line
    ends in its text, or name it otherwise (`patch`)."""
    try:
        value = json.loads(arguments, strict=False)
    except ValueError:
        return arguments
    if isinstance(value, dict):
        value = next(iter(value.values())) if len(value) == 1 else value.get("input")
    return value if isinstance(value, str) else arguments


def read_tools(given: Any, choice: Any = None, *, parallel: bool = True, more: Sequence[tuple[str, Any]] = ()) -> Tools:
    """Reads `tools`, `tool_choice` and `parallel_tool_calls` of chat and of /v1/responses.

    more: path and tool of each tool that an input item adds; known names are not added again. Raises ConversationError,
    which names the field, for a tool of an unknown type and for a choice that cannot be met.
    """
    offered: list[Tool] = []
    warnings: list[str] = []
    for number, tool in enumerate(sequence(given, "tools")):
        _read_tool(tool, f"tools[{number}]", offered, warnings)
    seen: dict[str, Tool] = {}
    for tool in offered:
        if tool.name in seen:
            raise ConversationError(
                f"{tool.place}: {seen[tool.name].place} has the name {tool.name!r:.80} too; rename one.", tool.place
            )
        seen[tool.name] = tool
    added: list[Tool] = []
    for place, tool in more:
        _read_tool(tool, place, added, warnings)
    for tool in added:
        if seen.setdefault(tool.name, tool) is tool:
            offered.append(tool)
    return _chosen(offered, choice, parallel, warnings)


def _read_tool(
    tool: Any, place: str, offered: list[Tool], warnings: list[str], namespace: str | None = None, about: str = ""
) -> None:
    named = isinstance(tool, Mapping) and tool.keys() & {"name", "function"}
    kind = fields_of(tool).get("type") or ("function" if named else None)
    if kind == "namespace" and namespace is None:
        name, inner = _name(tool, place), tool.get("tools")
        if not isinstance(inner, Sequence) or isinstance(inner, str):
            raise expected(f"{place}.tools", "a list of functions", inner)
        for number, one in enumerate(inner):
            _read_tool(one, f"{place}.tools[{number}]", offered, warnings, name, tool.get("description") or "")
        return
    if kind in ("function", "custom") or (kind == SEARCH and tool.get("execution") == "client"):
        offered.append(_callable(tool, kind, place, namespace, about))
        return
    if is_hosted(kind):
        name = (tool.get("name") or tool.get("server_label")) if isinstance(tool, Mapping) else None
        warnings.append(f"{place} is left out: this server runs no tool of type {kind}{f' ({name})' if name else ''}")
        return
    raise expected(f"{place}.type", "function, custom, namespace or a hosted tool of OpenAI's", kind)


def names_of(tools: Sequence[Any], place: str) -> list[str]:
    """Returns the names under which the model is offered these tools. place: of their list."""
    found: list[Tool] = []
    for number, tool in enumerate(tools):
        _read_tool(tool, f"{place}[{number}]", found, [])
    return [tool.name for tool in found]


def is_hosted(kind: Any) -> bool:
    """True for a tool type that its vendor's servers run, or that only its vendor's models know."""
    if not isinstance(kind, str):
        return False
    words, _, date = kind.rpartition("_")
    plain = words if date.isdigit() else kind
    return plain in HOSTED or (date.isdigit() and plain.startswith(_ANTHROPIC)) or plain.startswith("web_search")


def _callable(tool: Json, kind: str, place: str, namespace: str | None, about: str) -> Tool:
    path = f"{place}.{kind}" if kind in tool else place  # chat nests it, /v1/responses does not
    inner = mapping(tool.get(kind, tool), path)
    for other in OTHER_SCHEMAS & inner.keys():
        raise ConversationError(
            f"{path}.{other}: expected the schema in parameters, as OpenAI's tools have it.", f"{path}.{other}"
        )
    name = SEARCH if kind == SEARCH else _name(inner, path)
    description = inner.get("description")
    if description is not None and not isinstance(description, str):
        raise expected(f"{path}.description", "a text", description)
    if about and namespace:
        description = f"{description or ''}\n({namespace}: {about})".strip()
    own: dict[str, Any] = {"name": _joined(namespace, name) if namespace else name, "own_name": name, "place": place}
    own |= {"namespace": namespace, "description": description}
    if kind != "custom":
        parameters = inner.get("parameters")
        if mapping(parameters, f"{path}.parameters", "a JSON schema"):
            parameters = {"type": "object", **parameters}  # so that a grammar holds a call to it
        return Tool(**own, kind=kind, parameters=parameters, strict=inner.get("strict") or None)  # type: ignore[arg-type]
    form = _format(inner.get("format"), f"{path}.format")
    if form:
        grammar = f"The input follows this {form['syntax']} grammar:\n{form['definition']}"
        own["description"] = "\n".join(filter(None, (description, grammar)))
    only = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    return Tool(**own, kind="custom", parameters=only, format=form)


def _format(given: Any, place: str) -> dict[str, str] | None:
    """Returns the grammar of a custom tool's input as {"syntax", "definition"}; None for any text."""
    kind = given.get("type") if isinstance(given, Mapping) else given
    if kind in (None, "text"):
        return None
    inner = given.get("grammar", given) if kind == "grammar" and isinstance(given, Mapping) else {}  # chat nests it
    syntax, definition = inner.get("syntax"), inner.get("definition")
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        raise expected(place, "text, or a grammar with a syntax (lark or regex) and a definition", given)
    return {"syntax": syntax, "definition": definition}


def _name(fields: Json, place: str) -> str:
    name = fields.get("name")
    if not isinstance(name, str) or not name or any(c.isspace() or c in "<|>" for c in name):
        raise expected(f"{place}.name", "a name without spaces and < | >", name)
    return name


def _chosen(offered: list[Tool], choice: Any, parallel: bool, warnings: list[str]) -> Tools:
    """Applies a `tool_choice` in the spelling of chat, /v1/responses or deprecated `function_call`."""

    def tools(mode: str, only: Sequence[Tool] = offered, tool: Tool | None = None) -> Tools:
        if mode == "required" and not only:
            raise ConversationError("tool_choice: a call is required, but tools has no function.", "tool_choice")
        if mode == "required" and len(only) == 1 and only[0].format is not None:  # so its grammar can be enforced
            mode, tool = "function", only[0]
        return Tools(tuple(only), Choice(mode, tool), parallel, tuple(warnings))  # type: ignore[arg-type]

    if choice is None or choice in ("auto", "none", "required"):
        return tools(choice or "auto")
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind in ("function", "custom"):
        return tools("function", offered, _named(offered, choice, "tool_choice"))
    if kind == "allowed_tools":
        inner = fields_of(choice.get("allowed_tools", choice))
        mode, allowed = inner.get("mode", "auto"), inner.get("tools")
        if mode not in ("auto", "required") or not isinstance(allowed, Sequence) or not allowed:
            raise expected("tool_choice", "allowed_tools with a mode (auto, required) and tools", choice)
        functions = [tool for tool in allowed if not is_hosted(fields_of(tool).get("type"))]
        wanted = [_named(offered, tool, "tool_choice.tools") for tool in functions]
        return tools(mode, [tool for tool in offered if tool in wanted])
    if is_hosted(kind):
        raise ConversationError(f"tool_choice: this server runs no tool of type {kind}.", "tool_choice")
    raise expected("tool_choice", "auto, none, required, a function or allowed_tools", choice)


def _named(offered: Sequence[Tool], choice: Any, place: str) -> Tool:
    inner = fields_of(fields_of(choice).get(fields_of(choice).get("type"), choice))
    name, namespace = inner.get("name"), inner.get("namespace")
    for tool in offered:
        if name in (tool.name, tool.own_name) and namespace in (None, tool.namespace):
            return tool
    known = ", ".join(tool.own_name for tool in offered) or "none"
    raise expected(place, f"one of the tools ({known:.200})", name)
