"""Replaces vLLM's request handlers by the front end's (`serving/openai/`)."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, either, repair
from npu_gptoss.serving.compat.targets import NEWER
from npu_gptoss.serving.openai.intake import is_ours

UNTIL = "vLLM lets a plugin answer its routes by default (vllm.endpoint_plugins)"


@repair("chat", "vllm.entrypoints.openai.serving_chat:OpenAIServingChat.create_chat_completion", until=UNTIL)
@repair(
    "chat",
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_completion",
    releases=NEWER,
    until=UNTIL,
)
def install_chat(module: ModuleType) -> None:
    """vLLM's own handler of gpt-oss chats loses text, calls and fields of a request."""
    serving = module.OpenAIServingChat

    @around(serving, either(serving, "_create_chat_completion", "create_chat_completion"))
    async def create(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import chat

        if type(self) is not serving:  # another API of vLLM, which rewrites the chunks
            return await original(self, request, raw_request)
        return await chat.create(original, self, request, raw_request)


REPLAY, MISSING, CANCEL = "responses_background_stream_generator", "_make_not_found_error", "cancel_responses"
OTHERS = f".{REPLAY} .{MISSING} .{CANCEL}"


@repair(
    "responses",
    f"vllm.entrypoints.openai.serving_responses:OpenAIServingResponses.create_responses {OTHERS}",
    until=UNTIL,
)
@repair(
    "responses",
    f"vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._create_responses {OTHERS}",
    releases=NEWER,
    until=UNTIL,
)
def install_responses(module: ModuleType) -> None:
    """vLLM's own handler of /v1/responses refuses agents' tools and items, and loses calls."""
    serving = module.OpenAIServingResponses

    @around(serving, either(serving, "_create_responses", "create_responses"))
    async def create(original: Original, self: Any, request: Any, raw_request: Any = None) -> Any:
        from npu_gptoss.serving.openai import responses

        return await responses.create(original, self, request, raw_request)

    @around(serving, REPLAY)
    def replay(original: Original, self: Any, response_id: str, starting_after: int | None = None) -> Any:
        from npu_gptoss.serving.openai import responses

        return (responses.replay if is_ours(self) else original)(self, response_id, starting_after)

    @around(serving, MISSING)
    def missing(original: Original, self: Any, response_id: str) -> Any:
        from npu_gptoss.serving.openai import responses

        return (responses.not_found if is_ours(self) else original)(self, response_id)

    @around(serving, CANCEL)
    async def cancel(original: Original, self: Any, response_id: str) -> Any:
        from npu_gptoss.serving.openai import responses

        ended = responses.ended_in_background(self, response_id) if is_ours(self) else None
        return ended or await original(self, response_id)
