"""Tool calls: in the whole (not streamed) answer of a chat, the grammar of forced ones, tools without a description."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from npu_gptoss.harmony.parser import Kind
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.structures import KINDS, structure_of
from npu_gptoss.serving.compat.targets import (
    CHAT,
    CHAT_PROTOCOL,
    HARMONY,
    PROTOCOL,
    RESPONSES,
    RESPONSES_PROTOCOL,
    RESPONSES_SERVING,
    TOOLS,
    TOOLS_0_23,
)
from npu_gptoss.serving.compat.turn import Reading, assistant_turn, choice_of, reading_of


@repair("tool-answers", f"{TOOLS}:OpenAIToolParser.extract_tool_calls", lines=("0.11",), upstream="vllm issue 22337")
def install_parser(module: ModuleType) -> None:
    """With a tool parser a chat loses an answer that is cut off, rewrites arguments, and gives a call that
    tool_choice made the model write as content."""
    _tell_answers(module)


@repair(
    "tool-answers", f"{TOOLS_0_23}:OpenAIToolParser.extract_tool_calls", lines=("0.23",), upstream="vllm issue 22337"
)
def install_parser_0_23(module: ModuleType) -> None:
    """With a tool parser a chat of several answers keeps the last alone, arguments are written anew, and stop strings
    and a call that tool_choice made the model write are content, so that a whole answer is another than a streamed."""
    expect_source(module.OpenAIToolParser.extract_tool_calls, "content=final_content or commentary_content")
    _tell_answers(module, lambda request: None if request.parallel_tool_calls else 1)  # as this vLLM streams them


def _tell_answers(module: ModuleType, most: Callable[[Any], int | None] = lambda request: None) -> None:
    """most: how many calls of a request's answer are told; None: all."""
    parser = module.OpenAIToolParser
    expect_parameters(parser.extract_tool_calls, "self", "model_output", "request", "token_ids")

    @around(parser, "extract_tool_calls")
    def extract_tool_calls(
        original: Callable[..., Any], self: Any, model_output: str, request: Any, token_ids: Sequence[int] | None = None
    ) -> Any:
        """A call that is cut off is told too, as in the stream; it counts as none: the reason stays "length"."""
        if token_ids is None:
            return original(self, model_output, request, token_ids)
        turn = assistant_turn(reading_of(request)).read(token_ids)
        calls = [
            module.ToolCall(type="function", function=module.FunctionCall(name=call.name, arguments=call.text))
            for call in turn.calls[: most(request)]
        ]
        return module.ExtractedToolCallInformation(
            tools_called=turn.called, tool_calls=calls, content=turn.texts(Kind.ANSWER)
        )


@repair(
    "tools-without-flags", f"{CHAT}:OpenAIServingChat.__init__", lines=("0.11",), upstream="vllm issue 22578, PR 30867"
)
def install_default_parser(serving_chat: ModuleType) -> None:
    """Without --enable-auto-tool-choice a streamed chat has tool calls, and a whole one has their arguments as
    content; without --exclude-tools-when-tool-choice-none tool_choice "none" calls tools."""
    serving = serving_chat.OpenAIServingChat
    flags = ("enable_auto_tools", "tool_parser", "exclude_tools_when_tool_choice_none")
    expect_parameters(serving.__init__, "self", *flags)
    expect_source(serving.chat_completion_full_generator, "if self.tool_parser is not None:")

    @around(serving, "__init__")
    def __init__(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony:
            self.exclude_tools_when_tool_choice_none = True  # a model that sees no tool calls none
            if self.tool_parser is None:
                self.tool_parser = serving_chat.ToolParserManager.get_tool_parser("openai")


@repair("tool-description", f"{HARMONY}:create_tool_definition", lines=("0.11",), upstream="vllm PR 44686")
def install_definition(harmony_utils: ModuleType) -> None:
    """A tool without a description is refused with 400, although OpenAI's specification asks for none."""
    original = harmony_utils.create_tool_definition
    expect_parameters(original, "tool")
    expect_source(original, "description=tool.function.description", "description=tool.description")

    @functools.wraps(original)
    def create_tool_definition(tool: Any) -> Any:
        function = getattr(tool, "function", tool)
        return harmony_utils.ToolDescription.new(
            name=function.name,
            description=getattr(function, "description", None) or "",
            parameters=getattr(function, "parameters", None),
        )

    replace(harmony_utils, "create_tool_definition", create_tool_definition)


NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def forced_schema(request: Any, tools: Sequence[Any]) -> dict[str, Any] | None:
    """The JSON schema of the answer that `turn.forced_calls` reads; None when no call is forced.

    `tools` are functions with `name` and `parameters`. Raises ValueError for a function that is not among them, and for
    two different definitions under one name of `$defs`.
    """
    reading = Reading(*choice_of(request.tool_choice))
    if not reading.forced:
        return None
    parameters = {tool.name: dict(tool.parameters or NO_PARAMETERS) for tool in tools}
    if not parameters:
        raise ValueError("tool_choice asks for a call, but the request has no function in tools.")
    if reading.function is not None:
        if reading.function not in parameters:
            raise ValueError(f"tool_choice asks for {reading.function!r}; tools has {', '.join(parameters)}.")
        return parameters[reading.function]
    definitions: dict[str, Any] = {}
    for own in parameters.values():
        for name, definition in own.pop("$defs", {}).items():
            if definitions.setdefault(name, definition) != definition:
                raise ValueError(f"two tools define {name!r} in $defs, each in its own way: rename one.")
    calls = [
        {
            "properties": {"name": {"type": "string", "enum": [name]}, "parameters": own},
            "required": ["name", "parameters"],
        }
        for name, own in parameters.items()
    ]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"type": "object", "anyOf": calls}}
    # false is vLLM 0.11.0's default for chat, too
    one = request.parallel_tool_calls is False and "parallel_tool_calls" in request.model_fields_set
    return schema | ({"maxItems": 1} if one else {}) | ({"$defs": definitions} if definitions else {})


def _refuse_another(asked: Any, schema: Mapping[str, Any] | None) -> None:
    """asked: StructuredOutputsParams or None. Raises ValueError where a forced call's `schema` would not be alone."""
    others = [name for name, value in structure_of(asked).items() if name in KINDS and value != schema]
    if schema is not None and others:
        raise ValueError(
            f"tool_choice forces a call, structured_outputs.{others[0]} another answer: leave one of them out."
        )


@repair(
    "forced-call-schema",
    f"{PROTOCOL}:ChatCompletionRequest._get_json_schema_from_tool .to_sampling_params",
    f"{PROTOCOL}:ResponsesRequest.to_sampling_params",
    lines=("0.11",),
    upstream="vllm PR 44664 (open)",
)
def install_schema(protocol: ModuleType) -> None:
    """A forced call of a function without parameters has no grammar, one beside the format json_object is refused; on
    /v1/responses none has one."""
    chat, responses = protocol.ChatCompletionRequest, protocol.ResponsesRequest
    expect_source(chat._get_json_schema_from_tool, "return tool.parameters", '"minItems": 1')
    expect_parameters(responses.to_sampling_params, "self", "default_max_tokens", "default_sampling_params")

    def _get_json_schema_from_tool(self) -> dict[str, Any] | None:
        if self.tool_choice == "none" or self.tools is None:
            return None
        schema = forced_schema(self, [tool.function for tool in self.tools])
        _refuse_another(self.structured_outputs, schema)
        return schema

    replace(chat, "_get_json_schema_from_tool", _get_json_schema_from_tool)

    @around(chat, "to_sampling_params")
    def of_chat(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        forced = Reading(*choice_of(self.tool_choice)).forced  # the answer is the call, of which no format is asked
        return original(self.model_copy(update={"response_format": None}) if forced else self, *args, **kwargs)

    @around(responses, "to_sampling_params")
    def of_response(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        schema = forced_schema(self, allowed_functions(self))
        if schema is None:
            return original(self, *args, **kwargs)
        parameters = original(self.model_copy(update={"text": None}), *args, **kwargs)
        parameters.structured_outputs = protocol.StructuredOutputsParams(json=schema)
        return parameters


@repair(
    "forced-call-schema",
    f"{RESPONSES_PROTOCOL}:ResponsesRequest.to_sampling_params",
    f"{CHAT_PROTOCOL}:ChatCompletionRequest.to_sampling_params",
    lines=("0.23",),
    upstream="vllm PR 44664 (open)",
)
def install_schema_0_23(module: ModuleType) -> None:
    """A call that tool_choice forces has no grammar: the model may answer without one."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.sampling_params import StructuredOutputsParams

    def forced(original: Callable[..., Any], self: Any, schema: dict[str, Any] | None, *args: Any, **rest: Any) -> Any:
        if schema is None:
            return original(self, *args, **rest)
        bare = {"text": None} if isinstance(self, module.ResponsesRequest) else {"response_format": None}
        params = original(self.model_copy(update=bare), *args, **rest)
        asked = params.structured_outputs
        _refuse_another(asked, schema)
        both = StructuredOutputsParams(json=schema) if asked is None else dataclasses.replace(asked, json=schema)
        params.structured_outputs = both
        return params

    for kind in (module.ResponsesRequest, ChatCompletionRequest):
        expect_source(kind.to_sampling_params, "structured_outputs=")

    @around(module.ResponsesRequest, "to_sampling_params")
    def of_response(original: Callable[..., Any], self: Any, *args: Any, **rest: Any) -> Any:
        return forced(original, self, forced_schema(self, allowed_functions(self)), *args, **rest)

    @around(ChatCompletionRequest, "to_sampling_params")
    def of_chat(original: Callable[..., Any], self: Any, *args: Any, **rest: Any) -> Any:
        schema = forced_schema(self, [tool.function for tool in self.tools or ()])
        return forced(original, self, schema, *args, **rest)


def allowed_tools(request: Any) -> list[Any]:
    """The tools that the model may see under the `tool_choice` of a request of /v1/responses."""
    choice = request.tool_choice
    if choice == "none":
        return []
    if getattr(choice, "type", None) != "allowed_tools":
        return list(request.tools)
    allowed = {tool.get("name") for tool in choice.tools if tool.get("type") == "function"}
    unknown = allowed - {getattr(tool, "name", None) for tool in request.tools}
    if unknown or not allowed:
        raise ValueError(f"allowed_tools must name functions of tools; got {', '.join(map(str, unknown)) or 'none'}.")
    return [tool for tool in request.tools if getattr(tool, "name", None) in allowed]


def allowed_functions(request: Any) -> list[Any]:
    return [tool for tool in allowed_tools(request) if tool.type == "function"]


@repair(
    "responses-tool-choice",
    f"{RESPONSES}:OpenAIServingResponses._make_request_with_harmony",
    lines=("0.11",),
    upstream="vllm PR 44664 (open)",
)
def install_responses_choice(serving_responses: ModuleType) -> None:
    """/v1/responses refuses every tool_choice but "auto"."""
    _take_choices(serving_responses, 'if request.tool_choice != "auto":')


@repair(
    "responses-tool-choice",
    f"{RESPONSES_SERVING}:OpenAIServingResponses._make_request_with_harmony",
    lines=("0.23",),
    upstream="vllm PR 44664 (open)",
)
def install_responses_choice_0_23(serving: ModuleType) -> None:
    """/v1/responses answers a tool_choice that forces a call with 501, and shows tools that `none` forbids."""
    _take_choices(serving, 'request.tool_choice not in ("auto", "none"):')


def _take_choices(serving_responses: ModuleType, refusing: str) -> None:
    """refusing: what vLLM asks before it refuses a choice."""
    owner = serving_responses.OpenAIServingResponses
    expect_source(owner._make_request_with_harmony, refusing)
    expect_parameters(owner._make_request_with_harmony, "self", "request", "prev_response")

    @around(owner, "_make_request_with_harmony")
    def _make_request_with_harmony(original: Callable[..., Any], self: Any, request: Any, prev_response: Any) -> Any:
        forced_schema(request, allowed_functions(request))  # refused here with 400
        shown = request.model_copy(update={"tool_choice": "auto", "tools": allowed_tools(request)})
        return original(self, shown, prev_response)
