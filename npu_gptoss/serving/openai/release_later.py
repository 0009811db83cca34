"""How the handlers reach the engine of vLLM 0.23 and later."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from npu_gptoss.frontend.request import Defaults


def max_model_len(serving: Any) -> int:
    return serving.model_config.max_model_len


def defaults(serving: Any) -> Defaults:
    """Returns the defaults that the server's options set."""
    from vllm import envs

    template = getattr(serving, "default_chat_template_kwargs", None) or getattr(serving, "chat_template_kwargs", None)
    return Defaults(
        effort=(template or {}).get("reasoning_effort"),
        instructions_in_system=envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS,
        identity=(template or {}).get("model_identity"),
        with_usage=bool(getattr(serving, "enable_force_include_usage", False)),
    )


async def tokenizer(serving: Any) -> Any:
    return serving.renderer.tokenizer


def sampling(serving: Any, request: Any, prompt_tokens: int) -> Any:
    """Returns SamplingParams of a chat request without messages, tools and structure."""
    from vllm.entrypoints.serve.utils.api_utils import get_max_tokens

    defaults = serving.default_sampling_params or {}
    asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    most = get_max_tokens(
        max_model_len(serving), asked, prompt_tokens, defaults, getattr(serving, "override_max_tokens", None)
    )
    return request.to_sampling_params(most, defaults)


async def generate(
    serving: Any,
    request: Any,
    raw_request: Any,
    name: str,
    prompt: list[int],
    params: Any,
    **more: Any,
) -> AsyncGenerator[Any, None]:
    """Starts a request of the engine. `request`: as for `sampling`."""
    from vllm.inputs import tokens_input

    lora = serving._maybe_get_adapters(request)
    inputs = tokens_input(prompt, cache_salt=request.cache_salt)
    serving._log_inputs(name, inputs, params=params, lora_request=lora)
    trace = None if raw_request is None else await serving._get_trace_headers(raw_request.headers)
    return serving.engine_client.generate(
        inputs,
        params,
        name,
        lora_request=lora,
        trace_headers=trace,
        data_parallel_rank=serving._get_data_parallel_rank(raw_request),
        **more,
    )


def raise_if_error(serving: Any, finish_reason: str | None, name: str) -> None:
    serving._raise_if_error(finish_reason, name)


def about_answer(serving: Any, request: Any, output: Any, tokens: int) -> dict[str, Any]:
    """Returns answer fields from the engine, from the last RequestOutput. tokens: total generated."""
    names = ("kv_transfer_params", "ec_transfer_params")
    return {name: value for name in names if (value := getattr(output, name, None)) is not None}
