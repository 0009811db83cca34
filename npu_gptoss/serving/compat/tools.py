"""Tool calls in the whole (not streamed) answer of a chat.

0.11.0 extracts them only under `--enable-auto-tool-choice --tool-call-parser openai`, whereas the stream always does;
loses an answer that `max_tokens` cut off; and answers `tool_choice` "required" or a named function with the JSON that
it made the model write, as content.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, replace
from npu_gptoss.serving.compat.reading import Kind, split_by_kind

if TYPE_CHECKING:
    from vllm.entrypoints.openai.protocol import (
        ChatCompletionRequest,
        ExtractedToolCallInformation,
    )


def forced_calls(request: ChatCompletionRequest, content: str) -> list[tuple[str, str]]:
    """Name and arguments of the calls that `tool_choice` made the model write as its answer; empty when it is none.

    vLLM's grammar asks for `[{"name": …, "parameters": …}, …]` when a call is required, and for the arguments alone
    when the function is named.
    """
    choice = request.tool_choice
    if choice in (None, "none", "auto"):
        return []
    try:
        written = json.loads(content)
        if choice == "required":
            return [(call["name"], json.dumps(call["parameters"], ensure_ascii=False)) for call in written]
    except (ValueError, KeyError, TypeError):
        return []  # cut off, or not what the grammar asks for: content, as written
    return [(choice.function.name, content)]


def install_parser(module: ModuleType) -> None:
    parser = module.OpenAIToolParser
    original = parser.extract_tool_calls
    expect_parameters(original, "self", "model_output", "request", "token_ids")
    expect_source(original, "final_content = msg_text", "parser = parse_output_into_messages(token_ids)")

    @functools.wraps(original)
    def extract_tool_calls(
        self, model_output: str, request: ChatCompletionRequest, token_ids: Sequence[int] | None = None
    ) -> ExtractedToolCallInformation:
        found = original(self, model_output, request, token_ids)
        answers = split_by_kind(module.parse_output_into_messages(token_ids))[Kind.ANSWER]
        content = "\n".join(filter(None, answers)) if answers else None
        forced = forced_calls(request, content) if content and not found.tools_called else []
        if not forced:
            return found.model_copy(update={"content": content})
        calls = [
            module.ToolCall(type="function", function=module.FunctionCall(name=name, arguments=arguments))
            for name, arguments in forced
        ]
        return module.ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=None)

    replace(parser, "extract_tool_calls", extract_tool_calls)


def install_default_parser(serving_chat: ModuleType) -> None:
    serving = serving_chat.OpenAIServingChat
    original = serving.__init__
    expect_parameters(original, "self", "enable_auto_tools", "tool_parser")
    expect_source(serving.chat_completion_full_generator, "if self.tool_parser is not None:")

    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony and self.tool_parser is None:
            self.tool_parser = serving_chat.ToolParserManager.get_tool_parser("openai")

    replace(serving, "__init__", __init__)
