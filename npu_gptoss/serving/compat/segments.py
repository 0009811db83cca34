"""vLLM 0.33's reading of a turn: the hook for harmony/parser.py, and the names of what is told.

Its one parser, for whole answers and streams, swallows the HarmonyError.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from openai_harmony import Role

from npu_gptoss.harmony.parser import Kind, TolerantParser, kind_of
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import CHAT_SERVING, PARSING


@repair(
    "harmony-segments",
    f"{PARSING}:get_streamable_parser_for_assistant _SegmentType.from_channel_and_recipient",
    lines=("0.33",),
    upstream="vllm issues 46464, 51977 and 57099 (open)",
)
def install_segments(parsing: ModuleType) -> None:
    """Whatever openai-harmony's parser refuses is left out without a word, and with a badly spelled header all text
    behind it; so is text on a channel that vLLM does not know. A structured answer may begin with `final json`, by
    vLLM's own grammar, and is then told as a call of `json`."""
    from vllm.entrypoints.openai.parser import harmony_utils

    segment = parsing._SegmentType
    expect_source(harmony_utils.get_streamable_parser_for_assistant, "StreamableParser(get_encoding()")
    expect_source(parsing.HarmonyParser.process_chunk, "except HarmonyError: continue")
    expect_source(parsing.HarmonyParser.flush, "self._harmony_parser.process_eos()")
    expect_parameters(segment.from_channel_and_recipient, "channel", "recipient")

    def get_streamable_parser_for_assistant() -> TolerantParser:
        return TolerantParser(harmony_utils.get_encoding(), role=Role.ASSISTANT)

    replace(parsing, "get_streamable_parser_for_assistant", get_streamable_parser_for_assistant)

    @around(segment, "from_channel_and_recipient")
    def from_channel_and_recipient(original: Callable, channel: str | None, recipient: str | None) -> object:
        found, tool = original(channel, recipient), (recipient or "").partition(".")[0]
        if found is not segment.IGNORE or tool in harmony_utils.BUILTIN_TOOL_TO_MCP_SERVER_LABEL:
            return found
        return segment.CONTENT if kind_of(Role.ASSISTANT, channel, recipient) is Kind.ANSWER else segment.REASONING


@repair(
    "reasoning-name",
    f"{CHAT_SERVING}:OpenAIServingChat._create_chat_message",
    f"{PARSING}:HarmonyParser.parse_delta",
    lines=("0.33",),
)
def install_reasoning_name(serving: ModuleType) -> None:
    """Clients of vLLM look for message.reasoning_content, as they have for years; 0.33 has reasoning alone."""
    from vllm.parser.harmony import HarmonyParser

    chat = serving.OpenAIServingChat
    expect_source(chat._create_chat_message, "return ChatMessage(*args, **kwargs)")
    expect_source(HarmonyParser.parse_delta, "delta_message.reasoning = combined_reasoning")

    # an extra field, which the classes allow: their constructors would log a warning for each
    @around(chat, "_create_chat_message")
    def _create_chat_message(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        message = original(self, *args, **kwargs)
        message.reasoning_content = message.reasoning
        return message

    @around(HarmonyParser, "parse_delta")
    def parse_delta(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        delta = original(self, *args, **kwargs)
        if delta is not None and delta.reasoning is not None:
            delta.reasoning_content = delta.reasoning
        return delta
