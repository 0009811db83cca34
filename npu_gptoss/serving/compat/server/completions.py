"""/v1/completions: structured output, and prompts that are too long for the model's context.

A prompt that is too long is refused with the message and the code by which clients know that they must shorten it. vLLM
0.11.0 also names the context minus max_tokens as the model's context, and encodes a text of any length before it
checks.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.frontend.structure import structure_of
from npu_gptoss.harmony.encoding import ContextError, check_characters, check_length
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.server.shutdown import is_final, stopping_error
from npu_gptoss.serving.compat.server.structures import OF_A_COMPLETION
from npu_gptoss.serving.compat.targets import ENGINE, NEWER

BEGINNING = "This model's maximum context length is "
# the message of 0.23 and 0.33
TOO_LONG = re.compile(r"Input length \((\d+)\) exceeds model's maximum context length \((\d+)\)\.")


UNTIL = "vLLM reads response_format of completions, and refuses deprecated fields instead of dropping them"
METHOD = "CompletionRequest.to_sampling_params"


@repair("completion-formats", f"vllm.entrypoints.openai.protocol:{METHOD}", upstream="vllm PR 26822", until=UNTIL)
@repair("completion-formats", f"vllm.entrypoints.openai.completion.protocol:{METHOD}", releases=NEWER, until=UNTIL)
def install_formats(module: ModuleType) -> None:
    """On 0.11 `response_format` of type text, and json_schema without a schema, end the engine; other formats are
    dropped, and later `guided_json`, `guided_regex` and similar fields, which clients have sent for years."""
    from vllm.sampling_params import StructuredOutputsParams

    expect_source(module.CompletionRequest.to_sampling_params, "structured_outputs=")

    @around(module.CompletionRequest, "to_sampling_params")
    def to_sampling_params(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
        asked = structure_of(self.model_dump(exclude_unset=True, by_alias=True))
        bare = self.model_copy(update={"response_format": None, "structured_outputs": None})
        params = original(bare, *args, **kwargs)
        params.structured_outputs = StructuredOutputsParams(**asked.fields) if asked else None
        if asked:
            setattr(params.structured_outputs, OF_A_COMPLETION, True)
        return params


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

    expect_source(
        CompletionRenderer._create_tokens_prompt, "This model's maximum context length is {max_length} tokens."
    )

    @around(serving_engine.OpenAIServing, "create_error_response")
    def create_error_response(original: Original, self: Any, message: str, *args: Any, **kwargs: Any) -> Any:
        return _refusal(message) or _ended(message) or original(self, message, *args, **kwargs)

    @around(CompletionRenderer, "_tokenize")
    async def _tokenize(
        original: Original, self: Any, text: str, max_length: Any, truncate_prompt_tokens: Any, *args: Any, **rest: Any
    ) -> Any:
        if max_length is not None and truncate_prompt_tokens is None:
            check_characters(self.model_config.max_model_len, len(text))
        return await original(self, text, max_length, truncate_prompt_tokens, *args, **rest)

    @around(CompletionRenderer, "_create_tokens_prompt")
    def _create_tokens_prompt(
        original: Original, self: Any, token_ids: list[int], max_length: int | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        if max_length is not None:  # the context minus max_tokens
            limit = self.model_config.max_model_len
            check_length(limit, len(token_ids), limit - max_length)
        return original(self, token_ids, None, *args, **kwargs)


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
