"""How the handlers reach the engine of vLLM 0.11.0."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vllm.entrypoints.openai.protocol import (  # noqa: F401
    ChatCompletionRequest,
    ChatCompletionResponse,
    ErrorInfo,
    ErrorResponse,
    RequestResponseMetadata,
    ResponsesResponse,
    UsageInfo,
)

from npu_gptoss.frontend.request import Asked, Defaults
from npu_gptoss.serving.openai.release_early import (  # noqa: F401
    CLIENT_ERRORS,
    about_choice,
    preflight,
    reused_prompt,
    scheduling,
)


def max_model_len(serving: Any) -> int:
    return serving.max_model_len


def defaults(serving: Any) -> Defaults:
    """Returns the defaults that the server's options set."""
    from vllm import envs

    return Defaults(
        instructions_in_system=envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS,
        with_usage=bool(getattr(serving, "enable_force_include_usage", False)),
    )


async def tokenizer(serving: Any) -> Any:
    return await serving.engine_client.get_tokenizer()


def sampling(serving: Any, request: ChatCompletionRequest, prompt_tokens: int) -> Any:
    """Returns SamplingParams of a chat request without messages, tools and structure."""
    from vllm.entrypoints.utils import get_max_tokens

    defaults = serving.default_sampling_params or {}
    most = get_max_tokens(serving.max_model_len, request, prompt_tokens, defaults)
    return request.to_sampling_params(most, serving.model_config.logits_processor_pattern, defaults)


def hold(serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Constrains the answer to a structure. Returns keywords of `generate`."""
    from vllm.sampling_params import StructuredOutputsParams

    if fields:
        params.structured_outputs = StructuredOutputsParams(**fields)
    return {}


async def generate(
    serving: Any,
    request: ChatCompletionRequest,
    raw_request: Any,
    name: str,
    prompt: list[int],
    params: Any,
    **more: Any,
) -> AsyncGenerator[Any, None]:
    """Starts a request of the engine. `request`: as for `sampling`."""
    from vllm.inputs.data import TokensPrompt

    lora = serving._maybe_get_adapters(request)
    serving._log_inputs(name, prompt, params=params, lora_request=lora)
    trace = None if raw_request is None else await serving._get_trace_headers(raw_request.headers)
    inputs = TokensPrompt(prompt_token_ids=prompt)
    if request.cache_salt is not None:
        inputs["cache_salt"] = request.cache_salt
    return serving.engine_client.generate(inputs, params, name, lora_request=lora, trace_headers=trace, **more)


def raise_if_error(serving: Any, finish_reason: str | None, name: str) -> None:
    """Does nothing: 0.11.0's engine has no such reason."""


def about_answer(serving: Any, request: ChatCompletionRequest, output: Any, tokens: int) -> dict[str, Any]:
    """Returns answer fields from the engine, from the last RequestOutput. tokens: total generated."""
    return {} if output.kv_transfer_params is None else {"kv_transfer_params": output.kv_transfer_params}
