"""Replaces vLLM's request handlers by the front end's (`serving/openai/`)."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, repair
from npu_gptoss.serving.compat.targets import ANTHROPIC_SERVING, CHAT, CHAT_SERVING, RESPONSES, RESPONSES_SERVING
from npu_gptoss.serving.openai.intake import is_ours

HANDLER = ("self", "request", "raw_request")


@repair(
    "chat",
    f"{CHAT}:OpenAIServingChat.create_chat_completion",
    releases=("0.11",),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_chat(module: ModuleType) -> None:
    """vLLM's own handler of gpt-oss chats loses text, calls and fields of a request."""
    _put_chat(module, "create_chat_completion")


@repair(
    "chat",
    f"{CHAT_SERVING}:OpenAIServingChat._create_chat_completion",
    releases=("0.23", "0.33"),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_chat_0_23(module: ModuleType) -> None:
    """vLLM's own handler of gpt-oss chats loses text, calls and fields of a request."""
    _put_chat(module, "_create_chat_completion")


def _put_chat(module: ModuleType, name: str) -> None:
    serving = module.OpenAIServingChat
    expect_parameters(getattr(serving, name), *HANDLER)

    @around(serving, name)
    async def create_chat_completion(
        original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None
    ) -> Any:
        from npu_gptoss.serving.openai import chat

        if type(self) is not serving:  # another API of vLLM, which rewrites the chunks
            return await original(self, request, raw_request)
        return await chat.create(original, self, request, raw_request)


REPLAY = ".responses_background_stream_generator"


@repair(
    "responses",
    f"{RESPONSES}:OpenAIServingResponses.create_responses {REPLAY}",
    releases=("0.11",),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_responses(module: ModuleType) -> None:
    """vLLM's own handler of /v1/responses refuses agents' tools and items, and loses calls."""
    _put_responses(module, "create_responses")


@repair(
    "responses",
    f"{RESPONSES_SERVING}:OpenAIServingResponses._create_responses {REPLAY}",
    releases=("0.23", "0.33"),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_responses_0_23(module: ModuleType) -> None:
    """vLLM's own handler of /v1/responses refuses agents' tools and items, and loses calls."""
    _put_responses(module, "_create_responses")


def _put_responses(module: ModuleType, name: str) -> None:
    serving = module.OpenAIServingResponses
    expect_parameters(getattr(serving, name), *HANDLER)
    expect_parameters(serving.responses_background_stream_generator, "self", "response_id", "starting_after")

    @around(serving, name)
    async def create_responses(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import responses

        return await responses.create(original, self, request, raw_request)

    @around(serving, "responses_background_stream_generator")
    async def responses_background_stream_generator(
        original: Callable[..., Any], self: Any, response_id: str, starting_after: int | None = None
    ) -> Any:
        from npu_gptoss.serving.openai import responses

        replay = responses.replay if is_ours(self) else original
        async for event in replay(self, response_id, starting_after):
            yield event


@repair(
    "messages",
    f"{ANTHROPIC_SERVING}:AnthropicServingMessages.create_messages .count_tokens",
    releases=("0.23", "0.33"),
    until="vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)",
)
def install_messages(module: ModuleType) -> None:
    """vLLM's own handler of /v1/messages sends streams without type and role, and answers a cut call with 500
    (0.23)."""
    serving = module.AnthropicServingMessages
    for name in ("create_messages", "count_tokens"):
        expect_parameters(getattr(serving, name), *HANDLER)

    @around(serving, "create_messages")
    async def create_messages(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import messages

        return await messages.create(original, self, request, raw_request)

    @around(serving, "count_tokens")
    async def count_tokens(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import messages

        return await messages.count(original, self, request, raw_request)
