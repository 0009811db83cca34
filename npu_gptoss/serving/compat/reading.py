"""vLLM's hooks for harmony/parser.py: its parser in the place of the strict one, its rule for what a message is.

vLLM 0.11.0 turns the strict parser's HarmonyError into an error response or a broken stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

from openai_harmony import Message, Role, StreamableParser

from npu_gptoss.harmony.parser import Kind, TolerantParser, kind_of, kind_of_message
from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import (
    CHAT,
    CHAT_SERVING,
    CONTEXT,
    HARMONY,
    HARMONY_UTILS,
    REASONING,
    RESPONSES,
)


@repair(
    "harmony-parser",
    f"{HARMONY} {CONTEXT} {CHAT}:get_streamable_parser_for_assistant",
    lines=("0.11",),
    upstream="vllm issues 23567 and 50690 (open)",
)
def install_parser(harmony_utils: ModuleType) -> None:
    """openai-harmony's parser raises at tokens after the end of a turn (ignore_eos, so every load test) and at
    headers that the model spells badly, which fails the request with all its text."""
    original = harmony_utils.get_streamable_parser_for_assistant
    repaired = getattr(harmony_utils, "AssistantTurnParser", None)
    if repaired is None:
        expect_source(original, "StreamableParser(get_encoding(), role=Role.ASSISTANT)")
    else:
        expect_source(original, "return AssistantTurnParser()")
        expect_source(repaired.process, "self.ignored_last_token = self._turn_ended", "super().process(token)")

    def get_streamable_parser_for_assistant() -> TolerantParser:
        return TolerantParser(harmony_utils.get_encoding(), role=Role.ASSISTANT)

    replace(
        harmony_utils,
        "get_streamable_parser_for_assistant",
        get_streamable_parser_for_assistant,
        copies=(CONTEXT, CHAT),
    )


def parse_chat_output(token_ids: Sequence[int]) -> tuple[str | None, str | None, bool]:
    """Reasoning and answer, each None when the model wrote none, of a turn that may be cut off anywhere."""
    from npu_gptoss.serving.compat.turn import assistant_turn

    turn = assistant_turn().read(token_ids)
    return turn.texts(Kind.REASONING), turn.texts(Kind.ANSWER), False


@repair(
    "harmony-channels",
    f"{HARMONY} {CHAT} {REASONING}:parse_chat_output",
    f"{HARMONY} {RESPONSES}:parse_output_message",
    f"{HARMONY} {RESPONSES}:parse_remaining_state",
    lines=("0.11",),
    upstream="vllm issues 23694 and 24837",
)
def install_channels(harmony_utils: ModuleType) -> None:
    """vLLM tells reasoning from answer by counting messages: an answer without reasoning, or one that is cut off,
    becomes reasoning, and /v1/responses fails at a preamble."""
    original_item = harmony_utils.parse_output_message
    original_rest = harmony_utils.parse_remaining_state
    expect_source(harmony_utils.parse_chat_output, "len(output_msgs) == 1", "output_msgs[:-1]")
    expect_source(original_item, 'raise ValueError(f"Unknown recipient: {recipient}")')
    expect_parameters(original_rest, "parser")

    def parse_output_message(message: Message) -> list:
        """An output item of /v1/responses; a message that 0.11.0 would raise for is told under its kind's channel."""
        kind = kind_of_message(message)
        built_in = message.recipient is not None and message.recipient.startswith(("browser.", "python", "container"))
        if kind is None or built_in:
            return original_item(message)
        shown = message.model_copy(update={"channel": kind.value})
        return original_item(shown if kind is Kind.CALL else shown.model_copy(update={"recipient": None}))

    def parse_remaining_state(parser: StreamableParser) -> list:
        if kind_of(parser.current_role, parser.current_channel, parser.current_recipient) is not Kind.ANSWER:
            return original_rest(parser)
        return original_rest(
            SimpleNamespace(
                current_content=parser.current_content,
                current_role=parser.current_role,
                current_recipient=None,
                current_channel=Kind.ANSWER.value,
            )
        )

    for function in (parse_chat_output, parse_output_message, parse_remaining_state):
        replace(harmony_utils, function.__name__, function, copies=(CHAT, RESPONSES, REASONING))


@repair("harmony-channels", f"{HARMONY_UTILS} {CHAT_SERVING} {REASONING}:parse_chat_output", lines=("0.23",))
def install_channels_0_23(harmony_utils: ModuleType) -> None:
    """A whole chat drops what the model says to a built-in tool on commentary, which a streamed one tells as
    reasoning."""
    expect_source(harmony_utils.parse_chat_output, 'msg.channel == "final" or (msg.channel == "commentary"')
    replace(harmony_utils, "parse_chat_output", parse_chat_output, copies=(CHAT_SERVING, REASONING))
