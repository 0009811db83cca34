"""How the handlers reach vLLM's engine, by release: `release()` is the object for this process's vLLM.

Each class holds what its release does differently from the one before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from npu_gptoss.frontend import messages
from npu_gptoss.frontend.request import Asked, Defaults
from npu_gptoss.serving.openai import tags
from npu_gptoss.serving.releases import here
from npu_gptoss.serving.releases import vllm as names

A_CHAT: Mapping[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}


class Release:
    """vLLM 0.11.0, and the signatures of the others."""

    client_errors: tuple[type[Exception], ...] = ()  # besides Python's
    frames = False  # vLLM puts harmony's framing around a structure, and forces calls itself

    def max_model_len(self, serving: Any) -> int:
        return serving.max_model_len

    def defaults(self, serving: Any) -> Defaults:
        """Returns the defaults that the server's options set."""
        from vllm import envs

        template = getattr(serving, "default_chat_template_kwargs", None) or getattr(
            serving, "chat_template_kwargs", None
        )
        return Defaults(
            effort=(template or {}).get("reasoning_effort"),
            instructions_in_system=envs.VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS,
            identity=(template or {}).get("model_identity"),
            with_usage=bool(getattr(serving, "enable_force_include_usage", False)),
        )

    async def tokenizer(self, serving: Any) -> Any:
        return await serving.engine_client.get_tokenizer()

    def preflight(self, serving: Any, samples: int) -> None:
        """Raises an error if the engine takes no requests."""
        if serving.engine_client.errored:
            raise serving.engine_client.dead_error

    def reused_prompt(self, serving: Any, request: Any) -> list[int] | None:
        """Returns the prompt's tokens if another server has encoded it."""
        return None

    def sampling(self, serving: Any, request: Any, prompt_tokens: int) -> Any:
        """Returns SamplingParams of a chat request without messages, tools and structure."""
        defaults = serving.default_sampling_params or {}
        most = names.get_max_tokens(serving.max_model_len, request, prompt_tokens, defaults)
        return request.to_sampling_params(most, serving.model_config.logits_processor_pattern, defaults)

    def hold(self, serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Constrains the answer to a structure. Returns keywords of `generate`."""
        if fields:
            params.structured_outputs = names.StructuredOutputsParams(**fields)
        return {}

    def scheduling(self, serving: Any, request: Any, raw_request: Any) -> dict[str, Any]:
        """Returns keywords of `generate` by which the engine schedules."""
        return {"priority": request.priority}

    def inputs(self, prompt: list[int], cache_salt: str | None) -> Any:
        """Returns the engine's form of a prompt."""
        from vllm.inputs.data import TokensPrompt

        inputs = TokensPrompt(prompt_token_ids=prompt)
        return inputs if cache_salt is None else inputs | {"cache_salt": cache_salt}

    async def generate(
        self, serving: Any, request: Any, raw_request: Any, name: str, prompt: list[int], params: Any, **more: Any
    ) -> AsyncGenerator[Any, None]:
        """Starts a request of the engine. `request`: as for `sampling`."""
        inputs, lora = self.inputs(prompt, request.cache_salt), serving._maybe_get_adapters(request)
        serving._log_inputs(name, prompt, params=params, lora_request=lora)
        trace = None if raw_request is None else await serving._get_trace_headers(raw_request.headers)
        return serving.engine_client.generate(inputs, params, name, lora_request=lora, trace_headers=trace, **more)

    def raise_if_error(self, serving: Any, finish_reason: str | None, name: str) -> None:
        """Does nothing: 0.11.0's engine has no such reason."""

    def about_choice(self, request: Any, output: Any, whole: bool) -> dict[str, Any] | None:
        """Returns choice fields from the engine, from a sample's last CompletionOutput."""
        return None

    def about_answer(self, serving: Any, request: Any, output: Any, tokens: int) -> dict[str, Any]:
        """Returns answer fields from the engine, from the last RequestOutput. tokens: total generated."""
        fields = ("kv_transfer_params", "ec_transfer_params")
        return {name: value for name in fields if (value := getattr(output, name, None)) is not None}


class Release_0_23(Release):
    def max_model_len(self, serving: Any) -> int:
        return serving.model_config.max_model_len

    async def tokenizer(self, serving: Any) -> Any:
        return serving.renderer.tokenizer

    def sampling(self, serving: Any, request: Any, prompt_tokens: int) -> Any:
        defaults = serving.default_sampling_params or {}
        asked = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
        limit, override = self.max_model_len(serving), getattr(serving, "override_max_tokens", None)
        return request.to_sampling_params(
            names.get_max_tokens(limit, asked, prompt_tokens, defaults, override), defaults
        )

    def hold(self, serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Sets reasoning_ended, because vLLM searches the whole prompt for an answer and finds earlier turns'."""
        super().hold(serving, params, asked, fields)
        return {"reasoning_ended": False} if fields else {}

    def scheduling(self, serving: Any, request: Any, raw_request: Any) -> dict[str, Any]:
        rank = serving._get_data_parallel_rank(raw_request)
        return super().scheduling(serving, request, raw_request) | {"data_parallel_rank": rank}

    def inputs(self, prompt: list[int], cache_salt: str | None) -> Any:
        from vllm.inputs import tokens_input

        return tokens_input(prompt, cache_salt=cache_salt)

    def raise_if_error(self, serving: Any, finish_reason: str | None, name: str) -> None:
        serving._raise_if_error(finish_reason, name)


class Release_0_33(Release_0_23):
    """Its grammars begin with the turn, not with the answer: vLLM's own code puts harmony's framing around a structure,
    and requests forced calls in the model's own format."""

    frames = True

    @property
    def client_errors(self) -> tuple[type[Exception], ...]:
        from vllm.exceptions import VLLMClientError

        return (VLLMClientError,)

    def defaults(self, serving: Any) -> Defaults:
        efforts = dict(getattr(getattr(serving, "online_renderer", serving), "reasoning_effort_map", None) or {})
        # --anthropic-disabled-thinking-effort; None: auto. gpt-oss always reasons
        off = getattr(getattr(serving, "disabled_thinking_effort_resolver", None), "_effort", None)
        if off not in (None, "none"):
            efforts[messages.THINKING_OFF] = off
        return dataclasses.replace(super().defaults(serving), efforts=efforts)

    def preflight(self, serving: Any, samples: int) -> None:
        serving._preflight(samples)

    def reused_prompt(self, serving: Any, request: Any) -> list[int] | None:
        """A prefill server has encoded it (`kv_transfer_params.prompt_token_ids`)."""
        from vllm.renderers.online_renderer import _reused_prompt_token_ids

        return _reused_prompt_token_ids(request, serving.renderer)

    def hold(self, serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Constrains the turn to a structure and to the tools."""
        tools, choice = asked.tools, asked.tools.choice
        chat: dict[str, Any] = dict(A_CHAT)
        if fields and not asked.structure.calls:
            chat["structured_outputs"] = dict(fields)
        if tools.functions and (asked.structure.calls or choice.mode == "auto"):
            named = {"type": "function", "function": {"name": choice.tool.name}} if choice.tool else choice.mode
            functions = tools.functions
            if asked.structure.calls:  # their arguments follow the schemas, as on the other releases
                functions = [tool | {"function": tool["function"] | {"strict": True}} for tool in functions]
            chat |= {"tools": functions, "tool_choice": named, "parallel_tool_calls": tools.parallel}
        if len(chat) == 2:
            return {}
        renderer = serving.online_renderer
        held = framed(chat, renderer.renderer.get_tokenizer(), renderer.model_config)
        params.structured_outputs = held
        if held is None:
            return {}
        if held.structural_tag is not None and "structural_tag" not in fields:
            from vllm.v1.structured_output.backend_xgrammar import has_xgrammar_unsupported_json_features

            config = serving.engine_client.vllm_config.structured_outputs_config
            tags.improve(held, config, has_xgrammar_unsupported_json_features)
        return {"reasoning_ended": True}

    def scheduling(self, serving: Any, request: Any, raw_request: Any) -> dict[str, Any]:
        return super().scheduling(serving, request, raw_request) | {
            "priority": serving._get_priority(request, raw_request),
            "session_id": serving._get_session_id(request, raw_request),
        }

    def about_choice(self, request: Any, output: Any, whole: bool) -> dict[str, Any] | None:
        from vllm.entrypoints.openai.chat_completion.serving import numpy2base64

        about: dict[str, Any] = {}
        if request.return_weight_versions:
            about["weight_versions"] = output.weight_versions
        if whole and output.routed_experts is not None:
            about["routed_experts"] = numpy2base64(output.routed_experts)
        return about or None

    def about_answer(self, serving: Any, request: Any, output: Any, tokens: int) -> dict[str, Any]:
        from vllm.entrypoints.openai.chat_completion import serving as chat_serving

        about = super().about_answer(serving, request, output, tokens)
        if (request.n or 1) > 1:
            return about
        metrics = None
        if getattr(serving, "enable_per_request_metrics", False):
            metrics = chat_serving.build_per_request_timing_metrics(output.metrics, tokens)
        if (speculation := chat_serving.build_spec_decoding_metrics(output)) is not None:
            metrics = metrics or chat_serving.PerRequestMetrics()
            metrics.speculative_decoding = speculation
        return about if metrics is None else about | {"metrics": metrics.model_dump()}


def framed(chat: Mapping[str, Any], tokenizer: Any, model_config: Any) -> Any:
    """Returns vLLM 0.33's structure of a turn, StructuredOutputsParams or None, for a chat request's structure and
    tools."""
    request = names.ChatCompletionRequest.model_validate(chat)
    _framing()(tokenizer, request.tools, model_config=model_config).adjust_request(request)
    return request.extract_structured_outputs()


@functools.cache
def _framing() -> type:
    """Returns vLLM's harmony parser, which frames structures.

    It frames tools even if no option names a call parser; else a call forced by tool_choice would be unconstrained.
    """
    from vllm.parser.harmony import HarmonyParser
    from vllm.reasoning.gptoss_reasoning_parser import GptOssReasoningParser
    from vllm.tool_parsers.gptoss_tool_parser import GptOssToolParser

    own = {"reasoning_parser_cls": GptOssReasoningParser, "tool_parser_cls": GptOssToolParser}
    return type("Framing", (HarmonyParser,), own)


@functools.cache
def release() -> Release:
    """Returns the object for the installed vLLM."""
    return {"0.11": Release, "0.23": Release_0_23, "0.33": Release_0_33}[here().name]()
