"""/v1/completions: structured output, and prompts that are too long for the model's context.

A prompt that is too long is refused with the message and the code by which clients know that they must shorten it. vLLM
0.11.0 also names the context minus max_tokens as the model's context, and encodes a text of any length before it
checks.
"""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.frontend.structure import structure_of
from npu_gptoss.harmony.encoding import ContextError, check_characters, check_length
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.server.shutdown import is_final, stopping_error
from npu_gptoss.serving.compat.targets import (
    COMPLETION_PROTOCOL,
    ENGINE,
    PROTOCOL,
)

BEGINNING = "This model's maximum context length is "
REFUSAL = "Error in preprocessing prompt inputs"  # vLLM's log message, with a traceback
# the message of 0.23 and 0.33
TOO_LONG = re.compile(r"Input length \((\d+)\) exceeds model's maximum context length \((\d+)\)\.")


@repair(
    "completion-formats",
    f"{PROTOCOL}:CompletionRequest.to_sampling_params",
    upstream="vllm PR 26822",
    until="vLLM reads response_format of completions, and refuses deprecated fields instead of dropping them",
)
def install_formats(module: ModuleType) -> None:
    """`response_format` of type text, and json_schema without a schema, end the engine; other formats are dropped."""
    expect_source(module.CompletionRequest.to_sampling_params, 'self.response_format.type == "json_object"')
    _read_structures(module.CompletionRequest)


@repair(
    "completion-formats",
    f"{COMPLETION_PROTOCOL}:CompletionRequest.to_sampling_params",
    releases=("0.23", "0.33"),
    until="vLLM reads response_format of completions, and refuses deprecated fields instead of dropping them",
)
def install_formats_0_23(module: ModuleType) -> None:
    """`guided_json`, `guided_regex` and similar fields, which clients of vLLM have sent for years, are silently
    dropped."""
    expect_source(module.CompletionRequest.to_sampling_params, "structured_outputs=")
    _read_structures(module.CompletionRequest)


def _read_structures(request_class: type) -> None:
    from vllm.sampling_params import StructuredOutputsParams

    @around(request_class, "to_sampling_params")
    def to_sampling_params(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = structure_of(self.model_dump(exclude_unset=True, by_alias=True))
        bare = self.model_copy(update={"response_format": None, "structured_outputs": None})
        params = original(bare, *args, **kwargs)
        params.structured_outputs = StructuredOutputsParams(**asked.fields) if asked else None
        return params


class OneLine(logging.Filter):
    """Logs a client's mistake as a single line. A TypeError or RuntimeError keeps its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.msg == REFUSAL and isinstance(error, ValueError):
            said = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(error)[:400])
            record.msg, record.args, record.exc_info = "A request was refused: %s", (said,), None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


@repair(
    "context-length",
    f"{ENGINE}:OpenAIServing.create_error_response",
    "vllm.entrypoints.renderer:CompletionRenderer._tokenize ._create_tokens_prompt",
    until="0.23",
)
def install_words(serving_engine: ModuleType) -> None:
    """A prompt longer than the model's context is encoded before it is refused, and the message names a wrong context;
    each refusal logs a traceback. A stream that the engine's end cut reports a bad request, which clients do not
    retry."""
    from vllm.entrypoints.renderer import CompletionRenderer

    making = CompletionRenderer._create_tokens_prompt
    expect_parameters(CompletionRenderer._tokenize, "self", "text", "max_length", "truncate_prompt_tokens")
    expect_parameters(making, "self", "token_ids", "max_length")
    expect_source(making, "This model's maximum context length is {max_length} tokens.")
    expect_parameters(serving_engine.OpenAIServing.create_error_response, "self", "message")

    @around(serving_engine.OpenAIServing, "create_error_response")
    def create_error_response(original: Callable[..., Any], self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        return _refusal(message) or _ended(message) or original(self, message, *args, **kwargs)

    @around(CompletionRenderer, "_tokenize")
    async def _tokenize(
        original, self, text: str, max_length: int | None, truncate_prompt_tokens: int | None, *args: Any, **kwargs: Any
    ) -> Any:
        if max_length is not None and truncate_prompt_tokens is None:
            check_characters(self.model_config.max_model_len, len(text))
        return await original(self, text, max_length, truncate_prompt_tokens, *args, **kwargs)

    @around(CompletionRenderer, "_create_tokens_prompt")
    def _create_tokens_prompt(
        original, self, token_ids: list[int], max_length: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if max_length is not None:  # the context minus max_tokens
            limit = self.model_config.max_model_len
            check_length(limit, len(token_ids), limit - max_length)
        return original(self, token_ids, None, *args, **kwargs)

    for name in ("completion", "tokenization"):
        logger = logging.getLogger(f"vllm.entrypoints.openai.serving_{name}")
        if not any(isinstance(known, OneLine) for known in logger.filters):
            logger.addFilter(OneLine())


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
    if not said.startswith(BEGINNING):
        return None
    # 0.11.0 appends the exception's cause
    return refused(said.removesuffix(" None"), kind="invalid_request_error", code=CONTEXT_CODE)


def _ended(said: str) -> Any | None:
    """Returns 503 for the message of the engine's or the server's end; None for other messages."""
    from vllm.v1.engine.exceptions import EngineDeadError

    from npu_gptoss.serving.openai.errors import failure

    return next((failure(end) for end in (stopping_error()(), EngineDeadError()) if said == str(end)), None)


def _words(tokens: int, limit: int) -> str:
    try:
        check_length(limit, tokens)
    except ContextError as error:
        return str(error)
    raise AssertionError(f"{tokens} tokens fit into {limit}")
