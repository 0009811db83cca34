"""A prompt that the model's context cannot hold is refused in the words and with the code that clients look for.

vLLM 0.11.0 also names the context less max_tokens as the model's context on /v1/completions, and encodes a text of any
length before it looks. vLLM 0.33 gives a request the tokens that are left, however many it asks for.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from http import HTTPStatus
from types import ModuleType
from typing import Any

from npu_gptoss.harmony.encoding import ContextError, check_characters, check_length
from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ENGINE, ERRORS, ERRORS_0_23, ERRORS_0_23_COPIES, ERRORS_COPIES

CODE = "context_length_exceeded"
BEGINNING = "This model's maximum context length is "
# the class that refuses -> the field that is too long
PARAMS = {"OpenAIServingChat": "messages", "OpenAIServingResponses": "input", "OpenAIServingCompletion": "prompt"}
REFUSAL = "Error in preprocessing prompt inputs"  # what vLLM logs, with a traceback
# as 0.23 and 0.33 say it, and as 0.23's /v1/responses does
TOO_LONG = re.compile(
    r"Input length \((\d+)\) exceeds model's maximum context length \((\d+)\)\.|"
    r"The engine prompt length (\d+) exceeds the max_model_len (\d+)\. Please reduce prompt\."
)
APIS = ("chat", "completion", "responses", "tokenization")


class OneLine(logging.Filter):
    """A client's mistake is one line of the log. A TypeError or RuntimeError keeps its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if record.msg == REFUSAL and isinstance(error, ValueError):
            said = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(error)[:400])
            record.msg, record.args, record.exc_info = "A request was refused: %s", (said,), None
            record.levelno, record.levelname = logging.INFO, "INFO"
        return True


def response_maker(protocol: Any) -> Callable[[str, int, str | None], Any]:
    """Makes vLLM's ErrorResponse of a sentence, a status and a field. `protocol` has vLLM's classes."""
    from pydantic import model_serializer

    class ContextLengthInfo(protocol.ErrorInfo):
        """`code` is the HTTP status for vLLM, and OpenAI's word for the client."""

        @model_serializer(mode="wrap")
        def _with_code(self, handler: Any) -> dict[str, Any]:
            return {**handler(self), "code": CODE}

    class ContextLengthResponse(protocol.ErrorResponse):
        error: ContextLengthInfo

    def made(message: str, status: int, param: str | None) -> Any:
        info = ContextLengthInfo(message=message, code=status, type="invalid_request_error", param=param)
        return ContextLengthResponse(error=info)

    return made


@repair(
    "context-length",
    f"{ENGINE}:OpenAIServing.create_error_response",
    "vllm.entrypoints.renderer:CompletionRenderer._tokenize ._create_tokens_prompt",
    lines=("0.11",),
)
def install(serving_engine: ModuleType) -> None:
    """A chat longer than the model's context is refused with 'max_tokens must be at least 1, got -874', which
    clients that shorten the history do not understand, and each refusal is a traceback in the log."""
    from vllm.entrypoints.openai import protocol
    from vllm.entrypoints.renderer import CompletionRenderer

    response_of = response_maker(protocol)
    serving = serving_engine.OpenAIServing
    making = CompletionRenderer._create_tokens_prompt
    expect_parameters(serving.create_error_response, "self", "message", "err_type", "status_code")
    expect_parameters(CompletionRenderer._tokenize, "self", "text", "max_length", "truncate_prompt_tokens")
    expect_parameters(making, "self", "token_ids", "max_length")
    expect_source(making, "This model's maximum context length is {max_length} tokens.")

    @around(serving, "create_error_response")
    def create_error_response(
        original: Callable[..., Any],
        self: Any,
        message: str,
        err_type: str = "BadRequestError",
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
    ) -> protocol.ErrorResponse:
        response = original(self, message, err_type, status_code)
        if not message.startswith(BEGINNING):
            return response
        return response_of(message.removesuffix(" None"), response.error.code, PARAMS.get(type(self).__name__))

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
        if max_length is not None:  # the context less max_tokens
            limit = self.model_config.max_model_len
            check_length(limit, len(token_ids), limit - max_length)
        return original(self, token_ids, None, *args, **kwargs)

    for name in APIS:
        logger = logging.getLogger(f"vllm.entrypoints.openai.serving_{name}")
        if not any(isinstance(known, OneLine) for known in logger.filters):
            logger.addFilter(OneLine())


@repair("context-length", f"{' '.join((ERRORS_0_23, *ERRORS_0_23_COPIES))}:create_error_response", lines=("0.23",))
def install_words_0_23(module: ModuleType) -> None:
    """A prompt longer than the model's context is refused without the code, and a chat also without the words, by
    which clients know that they have to shorten the conversation."""
    from vllm.entrypoints.openai.engine import protocol

    _with_words(module, ERRORS_0_23_COPIES, protocol)


@repair("context-length", f"{' '.join((ERRORS, *ERRORS_COPIES))}:create_error_response", lines=("0.33",))
def install_words(module: ModuleType) -> None:
    """A prompt longer than the model's context is refused without the code, and a chat also without the words, by
    which clients know that they have to shorten the conversation."""
    _with_words(module, ERRORS_COPIES, module)


def _with_words(module: ModuleType, copies: tuple[str, ...], protocol: ModuleType) -> None:
    """`protocol` has the classes of vLLM's errors."""
    expect_parameters(module.create_error_response, "message", "err_type", "status_code", "param")
    response_of = response_maker(protocol)

    @around(module, "create_error_response", copies=copies)
    def create_error_response(original: Callable[..., Any], message: Any, *args: Any, **kwargs: Any) -> Any:
        said = str(message)
        if found := TOO_LONG.fullmatch(said):
            said = _words(*map(int, filter(None, found.groups())))
        if not said.startswith(BEGINNING):
            return original(message, *args, **kwargs)
        return response_of(said, HTTPStatus.BAD_REQUEST.value, None)


def _words(tokens: int, limit: int) -> str:
    try:
        check_length(limit, tokens)
    except ContextError as error:
        return str(error)
    raise AssertionError(f"{tokens} tokens fit into {limit}")
