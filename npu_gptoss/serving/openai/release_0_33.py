"""How the handlers reach the engine of vLLM 0.33.0.

Its grammars begin with the turn, not with the answer: vLLM's own code puts harmony's framing around a structure, and
requests forced calls in the model's own format.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vllm.entrypoints.generate.base.protocol import RequestResponseMetadata  # noqa: F401
from vllm.entrypoints.openai.chat_completion.protocol import (  # noqa: F401
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse  # noqa: F401
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse, UsageInfo  # noqa: F401
from vllm.exceptions import VLLMClientError

from npu_gptoss.frontend import messages
from npu_gptoss.frontend.request import Asked, Defaults
from npu_gptoss.serving.openai import release_later
from npu_gptoss.serving.openai.release_later import (  # noqa: F401
    generate,
    max_model_len,
    raise_if_error,
    sampling,
    tokenizer,
)

CLIENT_ERRORS = (VLLMClientError,)  # besides Python's


def defaults(serving: Any) -> Defaults:
    """Returns the defaults that the server's options set."""
    from dataclasses import replace

    efforts = dict(getattr(getattr(serving, "online_renderer", serving), "reasoning_effort_map", None) or {})
    # --anthropic-disabled-thinking-effort; None: auto. gpt-oss always reasons
    off = getattr(getattr(serving, "disabled_thinking_effort_resolver", None), "_effort", None)
    if off not in (None, "none"):
        efforts[messages.THINKING_OFF] = messages.EFFORTS.get(off, off)
    return replace(release_later.defaults(serving), efforts=efforts)


def preflight(serving: Any, samples: int) -> None:
    """Raises an error if the engine takes no requests."""
    serving._preflight(samples)


def reused_prompt(serving: Any, request: ChatCompletionRequest) -> list[int] | None:
    """Returns the prompt's tokens if the prefill server has encoded it (`kv_transfer_params.prompt_token_ids`)."""
    from vllm.renderers.online_renderer import _reused_prompt_token_ids

    return _reused_prompt_token_ids(request, serving.renderer)


def hold(serving: Any, params: Any, asked: Asked, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Constrains the turn to a structure and to the tools. Returns keywords of `generate`."""
    tools, choice = asked.tools, asked.tools.choice
    chat: dict[str, Any] = {"model": "", "messages": [{"role": "user", "content": ""}]}
    if fields and not asked.structure.calls:
        chat["structured_outputs"] = dict(fields)
    if tools.functions and (asked.structure.calls or choice.mode == "auto"):
        named = {"type": "function", "function": {"name": choice.tool.name}} if choice.tool else choice.mode
        functions = [_strict(tool) for tool in tools.functions] if asked.structure.calls else tools.functions
        chat |= {"tools": functions, "tool_choice": named, "parallel_tool_calls": tools.parallel}
    if len(chat) == 2:
        return {}
    framed = ChatCompletionRequest.model_validate(chat)
    renderer = serving.online_renderer
    parser = _framing()(renderer.renderer.get_tokenizer(), framed.tools, model_config=renderer.model_config)
    parser.adjust_request(framed)
    params.structured_outputs = framed.extract_structured_outputs()
    return {"reasoning_ended": True} if params.structured_outputs is not None else {}


def _strict(tool: dict[str, Any]) -> dict[str, Any]:
    """Makes a function's arguments follow its schema, as in forced calls on the other releases."""
    return tool | {"function": tool["function"] | {"strict": True}}


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


def scheduling(serving: Any, request: ChatCompletionRequest, raw_request: Any) -> dict[str, Any]:
    """Returns keywords of `generate` by which the engine schedules."""
    return {
        "priority": serving._get_priority(request, raw_request),
        "session_id": serving._get_session_id(request, raw_request),
    }


def about_choice(request: ChatCompletionRequest, output: Any, whole: bool) -> dict[str, Any] | None:
    """Returns choice fields from the engine, from a sample's last CompletionOutput."""
    from vllm.entrypoints.openai.chat_completion.serving import numpy2base64

    about: dict[str, Any] = {}
    if request.return_weight_versions:
        about["weight_versions"] = output.weight_versions
    if whole and output.routed_experts is not None:
        about["routed_experts"] = numpy2base64(output.routed_experts)
    return about or None


def about_answer(serving: Any, request: ChatCompletionRequest, output: Any, tokens: int) -> dict[str, Any]:
    """Returns answer fields from the engine, from the last RequestOutput. tokens: total generated."""
    from vllm.entrypoints.openai.chat_completion import serving as chat_serving

    about = release_later.about_answer(serving, request, output, tokens)
    if (request.n or 1) > 1:
        return about
    metrics = None
    if getattr(serving, "enable_per_request_metrics", False):
        metrics = chat_serving.build_per_request_timing_metrics(output.metrics, tokens)
    if (speculation := chat_serving.build_spec_decoding_metrics(output)) is not None:
        metrics = metrics or chat_serving.PerRequestMetrics()
        metrics.speculative_decoding = speculation
    return about if metrics is None else about | {"metrics": metrics.model_dump()}
