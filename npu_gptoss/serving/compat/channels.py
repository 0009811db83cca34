"""vLLM 0.23's reading of a turn: the hooks for harmony/parser.py, and what its stream and its whole answer differ in.

It reads by openai-harmony's strict parser, as 0.11.0 does, by channel and recipient, as 0.33 does. So it gets a parser
that gives up on nothing and names only channels that vLLM knows.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from openai_harmony import HarmonyEncoding, Message, Role

from npu_gptoss.harmony.parser import TOOL_PREFIX, Kind, TolerantParser, kind_of
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import CHAT_SERVING, HARMONY_UTILS, RENDERER_0_23, RESPONSES_CONTEXT


def known(role: Role | str | None, channel: str | None, recipient: str | None) -> tuple[str | None, str | None]:
    """Channel and recipient by which vLLM tells a message as what it is (harmony/parser.py: Kind).

    A call may leave out the `functions.` of its recipient: this vLLM takes it for one all the same.
    """
    from vllm.entrypoints.openai.parser import harmony_utils

    kind = kind_of(role, channel, recipient)
    if kind is None:
        return channel, recipient
    if kind is not Kind.ANSWER and harmony_utils.is_function_recipient(recipient or ""):
        return Kind.CALL.value, TOOL_PREFIX + recipient.removeprefix(TOOL_PREFIX)
    if (recipient or "").partition(".")[0] in harmony_utils.BUILTIN_TOOL_TO_MCP_SERVER_LABEL:
        return channel, recipient
    preamble = kind is Kind.ANSWER and recipient is None and channel == Kind.CALL.value
    return channel if preamble else kind.value, None


class ChannelParser(TolerantParser):
    """A tolerant parser, all of whose messages are on channels, and to recipients, that vLLM knows."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        super().__init__(encoding, role=Role.ASSISTANT)

    @property
    def _told_as(self) -> tuple[str | None, str | None]:
        written = super().current_channel, super().current_recipient
        return known(self.current_role, *written) if self.in_content else written

    @property
    def current_channel(self) -> str | None:
        return self._told_as[0]

    @property
    def current_recipient(self) -> str | None:
        return self._told_as[1]

    @property
    def messages(self) -> list[Message]:
        def told(message: Message) -> Message:
            channel, recipient = known(message.author.role, message.channel, message.recipient)
            return message.model_copy(update={"channel": channel, "recipient": recipient})

        return [told(message) for message in super().messages]


@repair(
    "harmony-parser",
    f"{HARMONY_UTILS} {RESPONSES_CONTEXT} {CHAT_SERVING}:get_streamable_parser_for_assistant",
    lines=("0.23",),
    upstream="vllm issues 23567 and 50690 (open)",
)
def install_parser(harmony_utils: ModuleType) -> None:
    """openai-harmony's parser raises at tokens after the end of a turn (ignore_eos, so every load test) and at headers
    that the model spells badly, which fails the request; text on a channel that vLLM does not know is left out."""
    expect_source(
        harmony_utils.get_streamable_parser_for_assistant,
        "return StreamableParser(get_encoding(), role=Role.ASSISTANT)",
    )

    def get_streamable_parser_for_assistant() -> ChannelParser:
        return ChannelParser(harmony_utils.get_encoding())

    replace(
        harmony_utils,
        "get_streamable_parser_for_assistant",
        get_streamable_parser_for_assistant,
        copies=(RESPONSES_CONTEXT, CHAT_SERVING),
    )


@repair(
    "tools-without-flags",
    f"{CHAT_SERVING}:OpenAIServingChat.__init__",
    f"{RENDERER_0_23}:OpenAIServingRender.__init__",
    lines=("0.23",),
    upstream="vllm issue 22578, PR 30867",
)
def install_default_parser_0_23(serving: ModuleType) -> None:
    """Without --enable-auto-tool-choice a streamed chat has tool calls, and a whole one has none; without
    --exclude-tools-when-tool-choice-none tool_choice "none" calls tools."""
    from vllm.entrypoints.serve.render.serving import OpenAIServingRender
    from vllm.tool_parsers import ToolParserManager

    expect_parameters(serving.OpenAIServingChat.__init__, "self", "enable_auto_tools", "tool_parser")
    expect_source(serving.OpenAIServingChat.chat_completion_full_generator, "if self.tool_parser is not None:")
    expect_source(OpenAIServingRender.render_chat, 'request.tool_choice == "none" and self.exclude_tools_when_')

    @around(serving.OpenAIServingChat, "__init__")
    def __init__(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony and self.tool_parser is None:
            self.tool_parser = ToolParserManager.get_tool_parser("openai")

    @around(OpenAIServingRender, "__init__")
    def render_init(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony:
            self.exclude_tools_when_tool_choice_none = True  # a model that sees no tool calls none
