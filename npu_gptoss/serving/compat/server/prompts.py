"""Prompts of the routes that the front end does not answer itself: one renderer for every route, in linear time.

vLLM encodes with openai-harmony's tokenizer, in the server's event loop. Its time is quadratic in the length of a run
of one character: 64 000 dashes take 3.5 s, and the longest body takes hours, in which no request is answered. vLLM also
renders a conversation differently from the front end's chats, so /tokenize and /render would count the tokens of
another prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from openai_harmony import Message

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import (
    BATCH_SERVING,
    RENDERER,
    RENDERER_0_23,
    SCORING,
    TOKENIZATION,
    TOKENIZATION_LATER,
)


@repair(
    "linear-encoding",
    f"{RENDERER}:render_for_completion",
    releases=("0.33",),
    upstream="openai/harmony issue 79 (open)",
    until="openai/harmony issue 79 is repaired",
)
def install_encoding(renderer: ModuleType) -> None:
    """Encoding a conversation with a long run of one character blocks the server for hours."""
    expect_parameters(renderer.render_for_completion, "messages")
    expect_source(renderer.render_for_completion, "encoding = get_encoding()")

    def render_for_completion(messages: list[Message]) -> list[int]:
        from npu_gptoss.serving.openai.engine import served_encoder

        return served_encoder().encode(messages)

    replace(renderer, "render_for_completion", render_for_completion)


@repair(
    "one-prompt",
    f"{RENDERER_0_23}:OpenAIServingRender._make_request_with_harmony .render_chat",
    releases=("0.23",),
    until="vLLM renders harmony as the published template does",
)
def install_renderer_0_23(module: ModuleType) -> None:
    """The routes that render a conversation show another prompt than the chat's."""
    _render_as_chats_do(module.OpenAIServingRender)


@repair(
    "one-prompt",
    f"{RENDERER}:OnlineRenderer._make_request_with_harmony .render_chat",
    releases=("0.33",),
    until="vLLM renders harmony as the published template does",
)
def install_renderer_0_33(module: ModuleType) -> None:
    """The routes that render a conversation, such as /tokenize, show another prompt than the chat's."""
    _render_as_chats_do(module.OnlineRenderer)


def _render_as_chats_do(renderer: type) -> None:
    making = renderer._make_request_with_harmony
    expect_parameters(making, "self", "request", "should_include_tools")
    expect_source(making, "engine_input = tokens_input(prompt_token_ids, cache_salt=request.cache_salt)")
    expect_parameters(renderer.render_chat, "self", "request", "skip_mm_cache")

    @around(renderer, "_make_request_with_harmony")
    def _make_request_with_harmony(
        original: Callable[..., Any], self: Any, request: Any, should_include_tools: bool = True
    ) -> tuple[list[Any], list[Any]]:
        from vllm.inputs import tokens_input

        from npu_gptoss.frontend import chat
        from npu_gptoss.serving.openai.engine import encoder_of
        from npu_gptoss.serving.openai.release import release

        if (request.kv_transfer_params or {}).get("prompt_token_ids"):  # from a prefill server: used unchanged
            return original(self, request, should_include_tools)
        body = request.model_dump(exclude_unset=True)
        body |= {} if should_include_tools else {"tools": None, "tool_choice": None}
        asked = chat.read(body, release().defaults(self)).asked
        prompt = asked.prompt(encoder_of(self), self.model_config.max_model_len)
        return asked.conversation, [tokens_input(prompt, cache_salt=request.cache_salt)]

    @around(renderer, "render_chat")
    async def render_chat(original: Callable[..., Any], self: Any, request: Any, **options: Any) -> Any:
        return await _beside(request, lambda: original(self, request, **options))


@repair(
    "batch-encoding",
    f"{BATCH_SERVING}:OpenAIServingChatBatch.create_batch_chat_completion",
    releases=("0.23", "0.33"),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_batch(module: ModuleType) -> None:
    """vLLM's own code reads the conversations of a batch, and encodes them in the server's event loop."""
    serving = module.OpenAIServingChatBatch
    expect_parameters(serving.create_batch_chat_completion, "self", "request", "raw_request")

    @around(serving, "create_batch_chat_completion")
    async def create_batch_chat_completion(
        original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None
    ) -> Any:
        from npu_gptoss.serving.openai import chat

        return await chat.create_batch(original, self, request, raw_request)


@repair(
    "tokenize-prompt",
    f"{TOKENIZATION}:OpenAIServingTokenization.create_tokenize",
    until="vLLM renders harmony as the published template does",
)
def install_tokenize(module: ModuleType) -> None:
    """/tokenize with messages renders the Jinja template, whose tokens differ from the chat's."""
    _tokenize_as_chats_do(module)


@repair(
    "tokenize-prompt",
    f"{TOKENIZATION_LATER}:OpenAIServingTokenization.create_tokenize",
    releases=("0.23",),
    until="vLLM renders harmony as the published template does",
)
def install_tokenize_0_23(module: ModuleType) -> None:
    """/tokenize with messages renders the Jinja template, whose tokens differ from the chat's."""
    _tokenize_as_chats_do(module)


@repair(
    "tokenize-prompt",
    f"{TOKENIZATION_LATER}:ServingTokenization.create_tokenize",
    releases=("0.33",),
    until="vLLM renders harmony as the published template does",
)
def install_tokenize_0_33(module: ModuleType) -> None:
    """With request logging, /tokenize refuses a conversation with calls: writing the log consumes the calls."""
    _tokenize_as_chats_do(module)


def _tokenize_as_chats_do(module: ModuleType) -> None:
    serving = getattr(module, "OpenAIServingTokenization", None) or module.ServingTokenization
    expect_parameters(serving.create_tokenize, "self", "request", "raw_request")
    made = "token_strs=token_strs"
    expect_source(serving.create_tokenize, "isinstance(request, TokenizeChatRequest)", "count=len(input_ids)", made)

    @around(serving, "create_tokenize")
    async def create_tokenize(original: Callable[..., Any], self: Any, request: Any, raw_request: Any) -> Any:
        from npu_gptoss.serving.openai import chat

        return await chat.tokenize(module, original, self, request, raw_request)


@repair(
    "scoring-prompts",
    f"{SCORING}:ServingGenerativeScoring._build_prompts",
    releases=("0.33",),
    until="vLLM tokenizes scoring prompts outside of its event loop",
)
def install_scoring(serving: ModuleType) -> None:
    """/generative_scoring encodes its texts in the event loop, and copies the query for each item: a long query with
    many items blocks every request for seconds."""
    scoring = serving.ServingGenerativeScoring
    expect_parameters(scoring._build_prompts, "self", "request", "tokenizer", "max_model_len")
    expect_source(scoring._build_prompts, "prompt_token_ids = query_token_ids + item_token_ids")

    one = ThreadPoolExecutor(1, "scoring")  # vLLM copies its tokenizer for each thread, and keeps the copies

    @around(scoring, "_build_prompts")
    async def _build_prompts(original: Callable[..., Any], *args: Any) -> Any:
        # the original never waits
        return await asyncio.get_running_loop().run_in_executor(one, lambda: asyncio.run(original(*args)))


async def _beside(request: Any, render: Callable[[], Any]) -> Any:
    """Renders long conversations in another thread. With harmony, `render` never waits, so it may run in another event
    loop."""
    from npu_gptoss.serving.openai.engine import IN_THE_LOOP

    parts = (getattr(request, name, None) for name in ("messages", "tools"))
    if sum(len(repr(part)) for part in parts if part is not None) <= IN_THE_LOOP:
        return await render()
    return await asyncio.to_thread(asyncio.run, render())
