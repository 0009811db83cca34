"""vLLM 0.23.0: how its handlers reach the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: F401
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.engine.protocol import (  # noqa: F401
    ErrorInfo,
    ErrorResponse,
    RequestResponseMetadata,
    UsageInfo,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse  # noqa: F401

from npu_gptoss.frontend.request import Asked
from npu_gptoss.serving.openai.release_later import (  # noqa: F401
    about_answer,
    defaults,
    generate,
    max_model_len,
    raise_if_error,
    sampling,
    tokenizer,
)

CLIENT_ERRORS: tuple[type[Exception], ...] = ()  # beyond Python's own


def reused_prompt(serving: Any, request: ChatCompletionRequest) -> list[int] | None:
    """The prompt's tokens, where another server has encoded it."""
    return None


def preflight(serving: Any, samples: int) -> None:
    """Raises where the engine takes no request."""
    if serving.engine_client.errored:
        raise serving.engine_client.dead_error


def hold(serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Hold the answer to a structure. Returns keywords of `generate`.

    reasoning_ended: vLLM looks for an answer in the whole prompt, and finds those of earlier turns.
    """
    from vllm.sampling_params import StructuredOutputsParams

    if not fields:
        return {}
    params.structured_outputs = StructuredOutputsParams(**fields)
    return {"reasoning_ended": False}


def scheduling(serving: Any, request: ChatCompletionRequest, raw_request: Any) -> dict[str, Any]:
    """Keywords of `generate` by which the engine schedules."""
    return {"priority": request.priority}


def about_choice(request: ChatCompletionRequest, output: Any, whole: bool) -> dict[str, Any] | None:
    """Fields of a choice that only the engine knows, from the last CompletionOutput of a sample."""
    return None
