"""Streams that lose nothing when the engine hands over several tokens at once.

vLLM merges the outputs of a request that the client has not taken yet, so that one output holds several tokens under
load (always with speculative decoding). 0.11.0's harmony streams look at the parser once an output: they send the last
token's text and channel, and drop the rest. Taking each output apart into outputs of one token repairs both APIs in one
place, and leaves vLLM's own loops as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.harmony.parser import TolerantParser
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.stops import mark
from npu_gptoss.serving.compat.targets import (
    CHAT,
    CHAT_SERVING,
    CONTEXT,
    RESPONSES,
    RESPONSES_CONTEXT,
    RESPONSES_SERVING,
)

if TYPE_CHECKING:
    from openai_harmony import Message
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import CompletionOutput, RequestOutput

logger = logging.getLogger("vllm.npu_gptoss")


def log_failure(what: str, error: Exception) -> None:
    """With its traceback, unless the engine's end explains it, which is told once and ends every request."""
    from vllm.v1.engine.exceptions import EngineDeadError

    ended = isinstance(error, EngineDeadError)
    logger.error("%s: %s", what, error, exc_info=None if ended else error)


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
    """An engine client that takes its streams apart and has stop strings end the answer (`stops`)."""

    def __init__(self, engine_client: EngineClient) -> None:
        self._engine_client = engine_client

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine_client, name)

    def generate(
        self, prompt: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        from vllm.sampling_params import RequestOutputKind

        mark(sampling_params)
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
    expect_parameters(serving.__init__, "self", "engine_client")

    @around(serving, "__init__")
    def __init__(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.use_harmony:
            self.engine_client = OneTokenAtATime(self.engine_client)


@repair(
    "chat-stream-tokens",
    f"{CHAT}:OpenAIServingChat.__init__",
    lines=("0.11",),
    upstream="vllm issue 28635, PRs 26291 and 30437",
)
def install_chat(serving_chat: ModuleType) -> None:
    """A streamed chat drops text when the engine hands over several tokens at once, as under load."""
    expect_source(
        serving_chat.OpenAIServingChat.chat_completion_stream_generator,
        "for token_id in output.token_ids: harmony_parser.process(token_id)",
        "delta_text = harmony_parser.last_content_delta",
    )
    _wrap_engine_client(serving_chat.OpenAIServingChat)


@repair(
    "responses-stream-tokens", f"{RESPONSES}:OpenAIServingResponses.__init__", lines=("0.11",), upstream="vllm PR 30437"
)
def install_responses(serving_responses: ModuleType) -> None:
    """A streamed response drops text when the engine hands over several tokens at once, as under load."""
    expect_source(
        serving_responses.OpenAIServingResponses._process_harmony_streaming_events,
        "ctx.parser.last_content_delta",
    )
    _wrap_engine_client(serving_responses.OpenAIServingResponses)


@repair("chat-stream-tokens", f"{CHAT_SERVING}:OpenAIServingChat.__init__", lines=("0.23",))
def install_chat_0_23(serving: ModuleType) -> None:
    """A streamed chat takes a second call of one function for the first when the engine hands over several tokens at
    once, as under load."""
    from npu_gptoss.serving.lines.vllm_0_23 import vllms_own

    expect_source(
        vllms_own(serving.OpenAIServingChat, "chat_completion_stream_generator"),
        "prev_recipient = harmony_parser.current_recipient",
        "for token_id in output.token_ids: harmony_parser.process(token_id)",
    )
    _wrap_engine_client(serving.OpenAIServingChat)


@repair("responses-stream-tokens", f"{RESPONSES_SERVING}:OpenAIServingResponses.__init__", lines=("0.23",))
def install_responses_0_23(serving: ModuleType) -> None:
    """A streamed response tells text under the wrong item when the engine hands over several tokens at once, as under
    load."""
    expect_source(
        serving.OpenAIServingResponses._process_harmony_streaming_events,
        "if ctx.is_expecting_start(): if len(ctx.parser.messages) > 0:",
    )
    _wrap_engine_client(serving.OpenAIServingResponses)


@repair(
    "responses-stream-end",
    f"{RESPONSES_CONTEXT}:StreamingHarmonyContext.append_output .append_tool_output",
    lines=("0.23",),
)
def install_context_0_23(context: ModuleType) -> None:
    """A streamed response that max_tokens cut off counts as completed; an output without tokens breaks it."""
    streaming = context.StreamingHarmonyContext
    expect_source(streaming.append_output, "self.last_tok = tok")
    expect_source(streaming.append_tool_output, "toks = self.encoding.render(msg)")
    around(streaming, "append_output")(_append_output)
    around(streaming, "append_tool_output")(_append_tool_output)


@repair("responses-stream-end", f"{CONTEXT}:StreamingHarmonyContext.append_output", lines=("0.11",))
def install_context(context: ModuleType) -> None:
    """A streamed response that max_tokens cut off counts as completed; an output without tokens breaks it."""
    streaming = context.StreamingHarmonyContext
    expect_parameters(streaming.append_output, "self", "output")
    expect_source(streaming.append_output, "self.last_tok = tok", "toks = self.encoding.render(msg)")

    @around(streaming, "append_output")
    def append_output(original: Callable[..., None], self: Any, output: RequestOutput | list[Message]) -> None:
        of_tool = isinstance(output, list)
        (_append_tool_output if of_tool else _append_output)(original, self, output)


def _append_output(original: Callable[..., None], self: Any, output: RequestOutput) -> None:
    if output.outputs[0].token_ids:
        original(self, output)
    elif isinstance(self.parser, TolerantParser):
        self.parser.pause()
    self.finish_reason = output.outputs[0].finish_reason or self.finish_reason


def _append_tool_output(original: Callable[..., None], self: Any, output: list[Message]) -> None:
    if isinstance(self.parser, TolerantParser):
        self.parser.resume()
    original(self, output)
