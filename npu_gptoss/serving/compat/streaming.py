"""Streams that lose nothing when the engine hands over several tokens at once.

vLLM merges the outputs of a request that the client has not taken yet, so that one output holds several tokens under
load (always with speculative decoding). 0.11.0's harmony streams look at the parser once an output: they send the last
token's text and channel, and drop the rest. Taking each output apart into outputs of one token repairs both APIs in one
place, and leaves vLLM's own loops as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from openai_harmony import HarmonyEncoding, Message, Role

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, replace
from npu_gptoss.serving.compat.reading import TOOL_PREFIX, Kind, TolerantParser, kind_of, kind_of_message

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.entrypoints.harmony_utils import StreamableParser
    from vllm.outputs import CompletionOutput, RequestOutput


def one_token_each(output: RequestOutput) -> Iterator[RequestOutput]:
    """The same output as a sequence of outputs of one token each; the last one carries what ends the request."""
    if all(len(completion.token_ids) <= 1 for completion in output.outputs):
        yield output
        return
    pieces = [piece for completion in output.outputs for piece in _pieces(completion)]
    for piece in pieces:
        part = copy.copy(output)
        part.outputs = [piece]
        part.finished = output.finished and piece is pieces[-1]
        yield part


def _pieces(completion: CompletionOutput) -> Iterator[CompletionOutput]:
    count = len(completion.token_ids)
    for i, token in enumerate(completion.token_ids):
        last = i == count - 1
        yield dataclasses.replace(
            completion,
            token_ids=[token],
            logprobs=None if completion.logprobs is None else completion.logprobs[i : i + 1],
            text=completion.text if last else "",
            finish_reason=completion.finish_reason if last else None,
            stop_reason=completion.stop_reason if last else None,
        )
    if not count:
        yield completion


class OneTokenAtATime:
    """An engine client whose streamed generations yield one token an output; anything else goes to the client."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.sampling_params import RequestOutputKind

        outputs = self._engine_client.generate(prompt, sampling_params, *args, **kwargs)
        return _taken_apart(outputs) if sampling_params.output_kind == RequestOutputKind.DELTA else outputs


async def _taken_apart(outputs: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[RequestOutput, None]:
    try:
        async for output in outputs:
            for part in one_token_each(output):
                yield part
    finally:
        await outputs.aclose()  # a client that went away must end the request in the engine at once


def _wrap_engine_client(serving: type) -> None:
    original = serving.__init__
    expect_parameters(original, "self", "engine_client", "model_config")

    @functools.wraps(original)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony:
            self.engine_client = OneTokenAtATime(self.engine_client)

    replace(serving, "__init__", __init__)


def install_chat(serving_chat: ModuleType) -> None:
    expect_source(
        serving_chat.OpenAIServingChat.chat_completion_stream_generator,
        "for token_id in output.token_ids: harmony_parser.process(token_id)",
        "delta_text = harmony_parser.last_content_delta",
    )
    _wrap_engine_client(serving_chat.OpenAIServingChat)


def install_responses(serving_responses: ModuleType) -> None:
    expect_source(
        serving_responses.OpenAIServingResponses._process_harmony_streaming_events,
        "ctx.parser.last_content_delta",
    )
    _wrap_engine_client(serving_responses.OpenAIServingResponses)


class ChatStreamParser(TolerantParser):
    """The parser as the loop of the streamed chat wants to see it: every message under the channel of its kind.

    So a preamble streams as content and a call on the analysis channel as a call, like in the whole answer. Messages of
    one kind are parted by a line break, also like there.
    """

    def __init__(self, encoding: HarmonyEncoding, role: Role | None) -> None:
        super().__init__(encoding, role)
        self._told: set[Kind] = set()  # kinds that have had text in an earlier message
        self._telling: Kind | None = None  # kind of the current message once it has text
        self._delta: str | None = None

    def process(self, token: int) -> ChatStreamParser:
        super().process(token)
        self._delta = super().last_content_delta
        kind = self._kind()
        if self._delta and kind is not None:
            if self._telling is None and kind in self._told and kind is not Kind.CALL:
                self._delta = "\n" + self._delta
            self._telling = kind
        elif self._completed and self._telling is not None:
            self._told.add(self._telling)
            self._telling = None
        return self

    def _kind(self) -> Kind | None:
        return (
            kind_of(self.current_role, super().current_channel, super().current_recipient) if self.in_content else None
        )

    @property
    def last_content_delta(self) -> str | None:
        """Taken once: an output without tokens, with which an aborted request ends, must not repeat the text."""
        delta, self._delta = self._delta, None
        return delta

    @property
    def current_channel(self) -> str | None:
        kind = self._kind()
        return None if kind is None else kind.value

    @property
    def current_recipient(self) -> str | None:
        recipient = super().current_recipient
        return recipient if recipient is not None and recipient.startswith(TOOL_PREFIX) else None

    @property
    def messages(self) -> list[Message]:
        shown = []
        for message in super().messages:
            kind = kind_of_message(message)
            shown.append(message if kind is None else message.model_copy(update={"channel": kind.value}))
        return shown


def install_chat_channels(serving_chat: ModuleType) -> None:
    """Stream every kind of message, and let a call that is cut off end the stream like any other text."""
    from vllm.entrypoints import harmony_utils

    serving = serving_chat.OpenAIServingChat
    expect_source(
        serving.chat_completion_stream_generator,
        'if cur_channel == "final":',
        'elif cur_channel == "analysis":',
        'cur_recipient.startswith("functions.")',
        "tool_parser.prev_tool_call_arr[index].get(",
    )
    check = serving._should_check_for_unstreamed_tool_arg_tokens
    expect_parameters(check, "self", "delta_message", "output")

    def get_streamable_parser_for_assistant() -> StreamableParser:
        return ChatStreamParser(harmony_utils.get_encoding(), role=Role.ASSISTANT)

    def _should_check_for_unstreamed_tool_arg_tokens(self, delta_message: Any, output: Any) -> bool:
        return not self.use_harmony and check(self, delta_message, output)  # harmony streams every token by itself

    replace(serving_chat, "get_streamable_parser_for_assistant", get_streamable_parser_for_assistant)
    replace(serving, "_should_check_for_unstreamed_tool_arg_tokens", _should_check_for_unstreamed_tool_arg_tokens)


def install_context(context: ModuleType) -> None:
    """/v1/responses: an output without tokens, the reason why a stream ended, and turns after a tool of the server."""
    streaming = context.StreamingHarmonyContext
    original = streaming.append_output
    expect_parameters(original, "self", "output")
    expect_source(original, "self.last_tok = tok", "toks = self.encoding.render(msg)")

    def append_output(self, output: RequestOutput | list[Message]) -> None:
        if isinstance(output, list):
            if isinstance(self.parser, TolerantParser):
                self.parser.resume()
            original(self, output)
            return
        if output.outputs[0].token_ids:
            original(self, output)
        elif isinstance(self.parser, TolerantParser):
            self.parser.pause()
        self.finish_reason = output.outputs[0].finish_reason or self.finish_reason

    replace(streaming, "append_output", append_output)


def install_indices(serving_responses: ModuleType) -> None:
    """Number the events of /v1/responses as the client counts them: each item's index, its one part the first."""
    serving = serving_responses.OpenAIServingResponses
    original = serving._process_harmony_streaming_events
    expect_source(original, "current_content_index += 1", "current_output_index += 1")

    @functools.wraps(original)
    async def _process_harmony_streaming_events(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        item = -1
        async for event in original(self, *args, **kwargs):
            if event.type == "response.output_item.added":
                item += 1
            if hasattr(event, "output_index"):
                event.output_index = item
            if hasattr(event, "content_index"):
                event.content_index = 0
            yield event

    replace(serving, "_process_harmony_streaming_events", _process_harmony_streaming_events)
