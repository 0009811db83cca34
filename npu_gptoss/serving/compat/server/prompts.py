"""Prompts of the routes that the front end does not answer itself: one renderer for every route, in linear time.

vLLM encodes with openai-harmony's tokenizer, in the server's event loop. Its time is quadratic in the length of a run
of one character: 64 000 dashes take 3.5 s, and the longest body takes hours, in which no request is answered. vLLM also
renders a conversation differently from the front end's chats, so /tokenize and /render would count the tokens of
another prompt. Its encoding needs the network; ours does not (`harmony/library.py`).
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import openai_harmony

from npu_gptoss.serving.compat.patch import Original, around, either, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.server import handlers
from npu_gptoss.serving.compat.targets import NEWER, RENDERER, RENDERER_0_23

UPSTREAM = "vllm issues 22525 and 57099, openai/harmony issue 79 (open)"
HARMONY = "harmony_utils:_harmony_encoding"
LINEAR = "openai/harmony issue 79 is repaired"
RENDERED = "vLLM renders harmony as the published template does"


@repair("harmony-encoding", f"vllm.entrypoints.{HARMONY}", upstream=UPSTREAM, until=LINEAR)
@repair(
    "harmony-encoding", f"vllm.entrypoints.openai.parser.{HARMONY}", releases=NEWER, upstream=UPSTREAM, until=LINEAR
)
def install_encoding(harmony_utils: ModuleType) -> None:
    """openai-harmony downloads its vocabulary when its encoding is loaded: a server without network does not start, or
    answers every chat with 500 (before 0.33). A long run of one character blocks the server for hours."""
    expect_source(harmony_utils.get_encoding, "if _harmony_encoding is None:", "load_harmony_encoding(")
    replace(harmony_utils, "_harmony_encoding", LinearEncoding())


class LinearEncoding(openai_harmony.HarmonyEncoding):
    """openai-harmony's encoding, loaded when it is first used."""

    def __init__(self) -> None:
        pass

    @functools.cached_property
    def _inner(self) -> Any:
        from npu_gptoss.harmony.library import load_encoding
        from npu_gptoss.serving.tokenizer_file import checkpoint_directory, served

        return load_encoding(checkpoint_directory(served[0]) if served else None)._inner

    def render_conversation_for_completion(self, conversation: Any, *_: Any, **__: Any) -> list[int]:
        from npu_gptoss.serving.openai.engine import served_encoder

        return served_encoder().encode(conversation.messages)


RENDERS = "._make_request_with_harmony .render_chat"


@repair("one-prompt", f"{RENDERER_0_23}:OpenAIServingRender{RENDERS}", releases="0.23", until=RENDERED)
@repair("one-prompt", f"{RENDERER}:OnlineRenderer{RENDERS}", releases="0.33", until=RENDERED)
def install_renderer(module: ModuleType) -> None:
    """The routes that render a conversation, such as /tokenize, show another prompt than the chat's."""
    renderer = getattr(module, either(module, "OnlineRenderer", "OpenAIServingRender"))
    expect_source(
        renderer._make_request_with_harmony,
        "engine_input = tokens_input(prompt_token_ids, cache_salt=request.cache_salt)",
    )
    expect_parameters(renderer.render_chat, "skip_mm_cache")

    @around(renderer, "_make_request_with_harmony")
    def _make_request_with_harmony(
        original: Original, self: Any, request: Any, should_include_tools: bool = True
    ) -> tuple[list[Any], list[Any]]:
        from vllm.inputs import tokens_input

        from npu_gptoss.frontend import chat
        from npu_gptoss.serving.openai.engine import encoder_of
        from npu_gptoss.serving.openai.intake import fields_of
        from npu_gptoss.serving.openai.release import release

        if (request.kv_transfer_params or {}).get("prompt_token_ids"):  # from a prefill server: used unchanged
            return original(self, request, should_include_tools)
        body = fields_of(request)
        body |= {} if should_include_tools else {"tools": None, "tool_choice": None}
        asked = chat.read(body, release().defaults(self)).asked
        prompt = asked.prompt(encoder_of(self), self.model_config.max_model_len)
        return asked.conversation, [tokens_input(prompt, cache_salt=request.cache_salt)]

    @around(renderer, "render_chat")
    async def render_chat(original: Original, self: Any, request: Any, **options: Any) -> Any:
        return await _beside(request, lambda: original(self, request, **options))


@repair(
    "batch-encoding",
    "vllm.entrypoints.openai.chat_completion.batch_serving:OpenAIServingChatBatch.create_batch_chat_completion",
    releases=NEWER,
    until=handlers.UNTIL,
)
def install_batch(module: ModuleType) -> None:
    """vLLM's own code reads the conversations of a batch, and encodes them in the server's event loop."""

    @around(module.OpenAIServingChatBatch, "create_batch_chat_completion")
    async def create(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import chat

        return await chat.create_batch(original, self, request, raw_request)


async def _beside(request: Any, render: Callable[[], Any]) -> Any:
    """Renders long conversations in another thread. With harmony, `render` never waits, so it may run in another event
    loop."""
    from npu_gptoss.serving.openai.engine import IN_THE_LOOP

    parts = (getattr(request, name, None) for name in ("messages", "tools"))
    if sum(len(repr(part)) for part in parts if part is not None) <= IN_THE_LOOP:
        return await render()
    return await asyncio.to_thread(asyncio.run, render())
