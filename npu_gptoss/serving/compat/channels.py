"""vLLM 0.23's reading of a turn: the hooks for harmony/parser.py, and what its stream and its whole answer differ in.

It reads by openai-harmony's strict parser, as 0.11.0 does, by channel and recipient, as 0.33 does. So it gets a parser
that gives up on nothing and names only channels that vLLM knows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openai_harmony import HarmonyEncoding, Message, Role, StreamableParser

from npu_gptoss.harmony.parser import Kind, TolerantParser, kind_of, text_of
from npu_gptoss.serving.compat.patch import Mismatch, around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import CHAT_SERVING, HARMONY_UTILS, RENDERER_0_23, RESPONSES_CONTEXT, TOOLS_0_23

if TYPE_CHECKING:
    from vllm.entrypoints.openai.engine.protocol import DeltaMessage


def known(role: Role | str | None, channel: str | None, recipient: str | None) -> tuple[str | None, str | None]:
    """Channel and recipient by which vLLM tells a message as what it is (harmony/parser.py: Kind)."""
    from vllm.entrypoints.openai.parser import harmony_utils

    kind = kind_of(role, channel, recipient)
    if kind is None:
        return channel, recipient
    tool = (recipient or "").partition(".")[0]
    if harmony_utils.is_function_recipient(recipient or "") or tool in harmony_utils.BUILTIN_TOOL_TO_MCP_SERVER_LABEL:
        return Kind.CALL.value if kind is Kind.CALL else channel, recipient
    preamble = kind is Kind.ANSWER and recipient is None and channel == Kind.CALL.value
    return channel if preamble else kind.value, None


class ChannelParser(TolerantParser):
    """A tolerant parser, all of whose messages are on channels, and to recipients, that vLLM knows."""

    def __init__(self, encoding: HarmonyEncoding) -> None:
        super().__init__(encoding, role=Role.ASSISTANT)
        self.told: dict[str, int] = {}  # field of a stream's deltas -> the message that it was last told of

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
    expect_source(harmony_utils.parse_chat_output, 'msg.channel == "final" or (msg.channel == "commentary"')

    def get_streamable_parser_for_assistant() -> ChannelParser:
        return ChannelParser(harmony_utils.get_encoding())

    replace(
        harmony_utils,
        "get_streamable_parser_for_assistant",
        get_streamable_parser_for_assistant,
        copies=(RESPONSES_CONTEXT, CHAT_SERVING),
    )


@repair(
    "tool-answers", f"{TOOLS_0_23}:OpenAIToolParser.extract_tool_calls", lines=("0.23",), upstream="vllm issue 22337"
)
def install_tools(module: ModuleType) -> None:
    """With a tool parser a chat of several answers keeps the last alone, and arguments are written anew, so that a
    whole answer is another than a streamed one."""
    parser = module.OpenAIToolParser
    expect_parameters(parser.extract_tool_calls, "self", "model_output", "request", "token_ids")
    expect_source(parser.extract_tool_calls, "content=final_content or commentary_content")

    @around(parser, "extract_tool_calls")
    def extract_tool_calls(
        original: Callable[..., Any], self: Any, model_output: str, request: Any, token_ids: Sequence[int] | None = None
    ) -> Any:
        from vllm.entrypoints.openai.parser import harmony_utils

        if token_ids is None:
            return original(self, model_output, request, token_ids)
        made = [message for message in module.parse_output_into_messages(token_ids).messages if _is_call(message)]
        calls = [
            module.ToolCall(
                type="function",
                function=module.FunctionCall(
                    name=module.extract_function_from_recipient(message.recipient),
                    arguments=text_of(message) + _missing(message),
                ),
            )
            for message in made
        ]
        return module.ExtractedToolCallInformation(
            tools_called=bool(calls), tool_calls=calls, content=harmony_utils.parse_chat_output(token_ids)[1]
        )


def _is_call(message: Message) -> bool:
    from vllm.entrypoints.openai.parser.harmony_utils import is_function_recipient

    return message.author.role is Role.ASSISTANT and is_function_recipient(message.recipient or "")


def _missing(call: Message) -> str:
    """What a call without arguments lacks: clients read JSON."""
    return "" if text_of(call).strip() else "{}"


@repair(
    "chat-stream-channels",
    f"{CHAT_SERVING}:extract_harmony_streaming_delta",
    lines=("0.23",),
)
def install_stream(serving: ModuleType) -> None:
    """A streamed chat runs several messages of one kind together, and ends a call that max_tokens cut off with
    "tool_calls", so that a client runs it."""
    from vllm.entrypoints.openai.engine import protocol

    from npu_gptoss.serving.lines.vllm_0_23 import vllms_own

    expect_parameters(
        serving.extract_harmony_streaming_delta, "harmony_parser", "token_states", "prev_recipient", "include_reasoning"
    )
    own = vllms_own(serving.OpenAIServingChat, "chat_completion_stream_generator")
    expect_source(own, "harmony_tools_streamed[i] |= tools_streamed_flag")

    @around(serving, "extract_harmony_streaming_delta")
    def extract_harmony_streaming_delta(
        original: Callable[..., tuple[DeltaMessage | None, bool]], harmony_parser: StreamableParser, **rest: Any
    ) -> tuple[DeltaMessage | None, bool]:
        delta, _ = original(harmony_parser=harmony_parser, **rest)
        messages = harmony_parser.messages
        if isinstance(harmony_parser, ChannelParser):
            number = len(messages) - harmony_parser.completed
            for name in ("content", "reasoning"):
                if text := getattr(delta, name, None):
                    if harmony_parser.told.setdefault(name, number) != number:
                        setattr(delta, name, "\n" + text)  # as the whole answer has them
                    harmony_parser.told[name] = number
            calls = [message for message in messages if _is_call(message)]
            if harmony_parser.completed and _is_call(messages[-1]) and (rest := _missing(messages[-1])):
                function = protocol.DeltaFunctionCall(arguments=rest)
                call = protocol.DeltaToolCall(index=len(calls) - 1, function=function)
                delta = delta or protocol.DeltaMessage()
                delta.tool_calls = [*delta.tool_calls, call]
        return delta, any(map(_is_call, messages))


@repair(
    "reasoning-name",
    f"{CHAT_SERVING}:ChatMessage extract_harmony_streaming_delta",
    lines=("0.23",),
)
def install_reasoning_name(serving: ModuleType) -> None:
    """Clients of vLLM look for message.reasoning_content, as they have for years; 0.23 has reasoning alone."""
    original = serving.ChatMessage
    expect_parameters(original, "reasoning")
    if "reasoning_content" in original.model_fields:
        raise Mismatch("ChatMessage has the field reasoning_content already")

    # an extra field, which the classes allow: their constructors would log each
    def ChatMessage(**fields: Any) -> Any:
        message = original(**fields)
        message.reasoning_content = message.reasoning
        return message

    replace(serving, "ChatMessage", ChatMessage)

    @around(serving, "extract_harmony_streaming_delta")
    def extract_harmony_streaming_delta(original: Callable[..., Any], **arguments: Any) -> Any:
        delta, called = original(**arguments)
        if delta is not None and delta.reasoning is not None:
            delta.reasoning_content = delta.reasoning
        return delta, called


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
