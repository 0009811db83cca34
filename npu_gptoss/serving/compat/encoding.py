"""Prompts of chats and responses of vLLM 0.23 and 0.33 in linear time; long ones in a thread, and no hopeless ones.

openai-harmony's tokenizer takes the square of the length of a run of one character, and these vLLMs have it run in the
server's event loop: 64 000 dashes take 3.5 s, all that a body may hold takes hours, in which nobody is answered.
The token ids are those of stock vLLM, but for the header of a tool's result: oss-harmony 0.0.10 puts its recipient
behind the channel, which is not what the model was trained on; vLLM 0.33 writes only the headers of calls back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from openai_harmony import Message

from npu_gptoss.harmony.encoding import Encoder, text_tokenizer
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import (
    BATCH_SERVING,
    HARMONY_UTILS,
    RENDERER,
    RENDERER_0_23,
    RESPONSES_CONTEXT,
    RESPONSES_SERVING,
    SCORING,
)
from npu_gptoss.serving.compat.vocabulary import checkpoint_directory

IN_THE_LOOP = 20_000  # characters, about 10 ms; a longer request is rendered in a thread

_served: ContextVar[Any] = ContextVar("npu_gptoss_served", default=None)  # the ModelConfig of the request's server


@repair(
    "harmony-encoding",
    f"{RENDERER}:OnlineRenderer.render_chat .render_responses",
    f"{RENDERER} {HARMONY_UTILS} {RESPONSES_CONTEXT}:render_for_completion",
    lines=("0.33",),
    upstream="openai/harmony issue 79 (open)",
)
def install(renderer: ModuleType) -> None:
    """A chat with a long run of one character holds the server for hours: its prompt is encoded in the event loop, by
    openai-harmony's tokenizer, which takes the square of the length of such a run."""
    from vllm.entrypoints.openai.parser import harmony_utils

    online = renderer.OnlineRenderer
    expect_parameters(online.render_chat, "self", "request", "skip_mm_cache")
    expect_source(online.render_chat, "if not self.use_harmony:", "self._make_request_with_harmony(")
    expect_source(online.render_responses, "if self.use_harmony: return self._render_responses_with_harmony(")
    expect_source(
        harmony_utils.render_for_completion,
        "messages = auto_drop_analysis_messages(messages)",
        "config=RenderConversationConfig(auto_drop_analysis=False)",
        "return _use_legacy_tool_call_headers(token_ids)",
    )

    replace(harmony_utils, "render_for_completion", _encoded, copies=(RENDERER, RESPONSES_CONTEXT))
    for name in ("render_chat", "render_responses"):
        around(online, name)(_rendered)


@repair("batch-encoding", f"{BATCH_SERVING}:OpenAIServingChatBatch.render_batch_chat_request", lines=("0.33",))
def install_batch(serving: ModuleType) -> None:
    """As harmony-encoding, of conversations in one request, whose prompts are made past the renderer's own entrance."""
    batch = serving.OpenAIServingChatBatch
    expect_parameters(batch.render_batch_chat_request, "self", "request")
    expect_source(batch.render_batch_chat_request, "if renderer.use_harmony:", "renderer._make_request_with_harmony(")

    @around(batch, "render_batch_chat_request")
    async def render_batch_chat_request(original: Callable[..., Any], self: Any, request: Any) -> Any:
        renderer = self.online_renderer
        return await _beside(renderer.model_config, renderer.use_harmony, request, lambda: original(self, request))


@repair("scoring-prompts", f"{SCORING}:ServingGenerativeScoring._build_prompts", lines=("0.33",))
def install_scoring(serving: ModuleType) -> None:
    """/generative_scoring encodes its texts, and writes the query once more for each item, in the event loop: a long
    query with many items holds everybody for seconds."""
    scoring = serving.ServingGenerativeScoring
    expect_parameters(scoring._build_prompts, "self", "request", "tokenizer", "max_model_len")
    expect_source(scoring._build_prompts, "prompt_token_ids = query_token_ids + item_token_ids")

    one = ThreadPoolExecutor(1, "scoring")  # vLLM copies its tokenizer for each that asks at once, and keeps the copies

    @around(scoring, "_build_prompts")
    async def _build_prompts(original: Callable[..., Any], *args: Any) -> Any:
        # which never waits
        return await asyncio.get_running_loop().run_in_executor(one, lambda: asyncio.run(original(*args)))


@repair(
    "harmony-encoding",
    f"{RENDERER_0_23}:OpenAIServingRender.render_chat",
    f"{RESPONSES_SERVING}:OpenAIServingResponses._make_request_with_harmony",
    f"{RENDERER_0_23} {HARMONY_UTILS} {RESPONSES_CONTEXT} {RESPONSES_SERVING}:render_for_completion",
    lines=("0.23",),
    upstream="openai/harmony issue 79 (open)",
)
def install_0_23(renderer: ModuleType) -> None:
    """A chat with a long run of one character holds the server for hours: its prompt is encoded in the event loop, by
    openai-harmony's tokenizer, which takes the square of the length of such a run."""
    from vllm.entrypoints.openai.parser import harmony_utils
    from vllm.entrypoints.openai.responses import serving

    render, responses = renderer.OpenAIServingRender, serving.OpenAIServingResponses
    expect_parameters(render.render_chat, "self", "request", "skip_mm_cache")
    expect_source(render.render_chat, "if not self.use_harmony:", "self._make_request_with_harmony(")
    expect_source(responses._make_request_with_harmony, "prompt_token_ids = render_for_completion(messages)")
    expect_source(harmony_utils.render_for_completion, "get_encoding().render_conversation_for_completion(")
    copies = (RENDERER_0_23, RESPONSES_CONTEXT, RESPONSES_SERVING)
    replace(harmony_utils, "render_for_completion", _encoded, copies=copies)
    around(render, "render_chat")(_rendered)

    @around(responses, "_make_request_with_harmony")
    def _make_request_with_harmony(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        _served.set(self.model_config)  # in the event loop: linear in what the context can hold
        return original(self, *args, **kwargs)


def _encoded(messages: list[Message]) -> list[int]:
    """In the place of vLLM's `render_for_completion`."""
    from vllm.entrypoints.openai.parser import harmony_utils

    config = _served.get()
    directory = None if config is None else checkpoint_directory(config)
    encoder = Encoder(harmony_utils.get_encoding(), None if directory is None else text_tokenizer(directory))
    limit = None if config is None else config.max_model_len
    return encoder.encode(harmony_utils.auto_drop_analysis_messages(messages), limit)


async def _rendered(original: Callable[..., Any], self: Any, request: Any, **options: Any) -> Any:
    return await _beside(self.model_config, self.use_harmony, request, lambda: original(self, request, **options))


async def _beside(config: Any, use_harmony: bool, request: Any, render: Callable[[], Any]) -> Any:
    """With harmony, `render` never waits: it may run in a loop of its own."""
    _served.set(config)
    if not use_harmony or _size(request) <= IN_THE_LOOP:
        return await render()
    return await asyncio.to_thread(asyncio.run, render())


def _size(request: Any) -> int:
    """Characters, roughly."""
    parts = (getattr(request, name, None) for name in ("messages", "input", "instructions", "tools"))
    return sum(len(part) if isinstance(part, str) else len(repr(part)) for part in parts if part is not None)
