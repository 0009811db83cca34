"""How the handlers reach the engine of vLLM 0.23.0."""

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
from npu_gptoss.serving.openai.release_early import (  # noqa: F401
    CLIENT_ERRORS,
    about_choice,
    preflight,
    reused_prompt,
    scheduling,
)
from npu_gptoss.serving.openai.release_later import (  # noqa: F401
    about_answer,
    defaults,
    generate,
    max_model_len,
    raise_if_error,
    sampling,
    tokenizer,
)


def hold(serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Constrains the answer to a structure. Returns keywords of `generate`.

    reasoning_ended is set, because vLLM searches the whole prompt for an answer and finds earlier turns' answers.
    """
    from vllm.sampling_params import StructuredOutputsParams

    if not fields:
        return {}
    params.structured_outputs = StructuredOutputsParams(**fields)
    return {"reasoning_ended": False}
