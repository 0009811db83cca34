"""/v1/completions: prompts that are too long for the model's context, and requests that the engine's end cut.

A prompt that is too long is refused with the message and the code by which clients know that they must shorten it.
`openai/intake.py` reads its structure and refuses a text that cannot fit before it is encoded.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.harmony.encoding import ContextError, check_length
from npu_gptoss.serving.compat.patch import Original, around, either, expect_source, repair
from npu_gptoss.serving.compat.server.shutdown import engine_ended, is_final, stopping_error
from npu_gptoss.serving.compat.targets import ENGINE, SERVING, SERVING_0_23

STREAM_ERROR = "create_streaming_error_response"
BEGINNING = "This model's maximum context length is "
# the message of 0.23 and 0.33
TOO_LONG = re.compile(r"Input length \((\d+)\) exceeds model's maximum context length \((\d+)\)\.")
TOO_MANY = re.compile(r"max_tokens=(\d+) cannot be greater than .*=(\d+)\. Please")
TOO_LONG_0_11 = re.compile(rf"{BEGINNING}(-?\d+) tokens. However, your request has (\d+) input tokens")


@repair("context-length", f"{ENGINE}:OpenAIServing.create_error_response", until="0.23")
def install_words(serving_engine: ModuleType) -> None:
    """The refusal of a prompt that is too long names the context minus max_tokens as the model's context, without the
    code by which clients know it. A stream that the engine's end cut reports a bad request, which clients do not
    retry."""
    from vllm.entrypoints.renderer import CompletionRenderer

    expect_source(
        CompletionRenderer._create_tokens_prompt,
        "This model's maximum context length is {max_length} tokens. ",
        "However, your request has {len(token_ids)} input tokens. ",
    )

    @around(serving_engine.OpenAIServing, "create_error_response")
    def create_error_response(original: Original, self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        if found := TOO_LONG_0_11.match(message):
            limit = self.model_config.max_model_len
            message = _words(int(found[2]), limit, limit - int(found[1]))
        return _refusal(message) or _ended(message) or original(self, message, *args, **kwargs)


@repair("stream-ends", f"{SERVING_0_23}:OpenAIServing.{STREAM_ERROR}", releases="0.23", until="vLLM answers 503")
@repair("stream-ends", f"{SERVING}:GenerateBaseServing.{STREAM_ERROR}", releases="0.33", until="vLLM answers 503")
def install_stream(module: ModuleType) -> None:
    """A stream that the engine's end cut reports 500, not 503."""

    @around(getattr(module, either(module, "OpenAIServing", "GenerateBaseServing")), STREAM_ERROR)
    def create_streaming_error_response(original: Original, self: Any, message: Any, *args: Any, **named: Any) -> str:
        from npu_gptoss.serving.openai.errors import failure

        ended = next((each for each in (message, getattr(message, "__cause__", None)) if is_final(each)), None)
        if ended is None:
            return original(self, message, *args, **named)
        return json.dumps(failure(ended).model_dump())


@repair("pauses", f"{SERVING}:GenerateBaseServing._raise_if_error", releases="0.33", until="vLLM answers 503")
def install_pauses(module: ModuleType) -> None:
    """A completion that /pause or /sleep cut is answered with 200."""

    @around(module.GenerateBaseServing, "_raise_if_error")
    def _raise_if_error(original: Original, self: Any, finish_reason: str | None, request_id: str) -> None:
        original(self, finish_reason, request_id)
        if finish_reason == "abort":  # a client that left hears nothing
            raise stopping_error()()


Handler = Callable[[Any, Any], Any]


def as_chats_do(handler: Handler) -> Handler:
    """Wraps an exception handler of vLLM: prompts that are too long, and requests that the engine's end cut, get the
    same answers as chats."""

    @functools.wraps(handler)
    async def handle(request: Any, error: Any) -> Any:
        from fastapi.responses import JSONResponse

        from npu_gptoss.serving.openai.errors import failure

        ended = next((each for each in (error, error.__cause__) if is_final(each)), None)
        said = _refusal(str(error)) if ended is None else failure(ended)
        if said is not None:
            return JSONResponse(said.model_dump(), status_code=said.error.code)
        answer = handler(request, error)
        return await answer if inspect.isawaitable(answer) else answer

    return handle


def _refusal(said: str) -> Any | None:
    """Returns the answer to a prompt that is too long, from vLLM's message or ours; None for other messages."""
    from npu_gptoss.serving.openai.errors import CONTEXT_CODE, refused

    if found := TOO_LONG.fullmatch(said):
        said = _words(*map(int, found.groups()))
    elif found := TOO_MANY.match(said):
        said = _words(0, int(found[2]), int(found[1]))
    if not said.startswith(BEGINNING):
        return None
    return refused(said, kind="invalid_request_error", code=CONTEXT_CODE)


def _ended(said: str) -> Any | None:
    """Returns 503 for the message of the engine's or the server's end; None for other messages."""
    from npu_gptoss.serving.openai.errors import failure

    return next((failure(end) for end in (stopping_error()(), engine_ended()()) if said == str(end)), None)


def _words(tokens: int, limit: int, max_tokens: int | None = None) -> str:
    try:
        check_length(limit, tokens, max_tokens)
    except ContextError as error:
        return str(error)
    raise AssertionError(f"{tokens} tokens fit into {limit}")
