"""vLLM 0.33.0, on NVIDIA GPUs: where its names are.

It brings all that the model of `serving.cuda` rides on: groups of KV cache blocks for layers with a window, and CUDA
graphs that break off at a function, without torch.compile. A step's lengths are on the device, with bounds on the host.
"""

from __future__ import annotations

import dataclasses
from http import HTTPStatus
from typing import Any

from npu_gptoss.serving.lines import resolve
from npu_gptoss.serving.steps import EAGER, MODES, Step, without_kernels

# The names that serving takes from vLLM, by module.
MODULES: dict[str, tuple[str, ...]] = {
    "vllm": ("ModelRegistry",),
    "vllm.compilation.breakable_cudagraph": ("eager_break_during_capture",),
    "vllm.config": ("CUDAGraphMode", "VllmConfig"),
    "vllm.distributed": (
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
        "tensor_model_parallel_all_gather",
        "tensor_model_parallel_all_reduce",
    ),
    "vllm.entrypoints.serve.middleware.authenticate": ("AuthenticationMiddleware",),
    "vllm.forward_context": ("ForwardContext", "get_forward_context"),
    "vllm.model_executor.layers.attention.kv_transfer_utils": ("maybe_transfer_kv_layer",),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.models.config": ("MODELS_CONFIG_MAP",),
    "vllm.model_executor.models.interfaces": ("SupportsEagle3",),
    "vllm.model_executor.warmup.jit_warmup": ("JitWarmupRegistry", "VllmJitKernel"),
    "vllm.platforms": ("current_platform",),
    "vllm.plugins": ("load_general_plugins",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "CommonAttentionMetadata",
        "MultipleOf",
    ),
    "vllm.v1.kv_cache_interface": ("AttentionSpec", "FullAttentionSpec", "KVCacheLayout", "SlidingWindowSpec"),
    "vllm.v1.metrics.loggers": ("StatLoggerBase",),
    "vllm.v1.worker.block_table": ("get_block_table_width",),
    "vllm.v1.worker.gpu.model_states.default": ("DefaultModelState",),
    "vllm.v1.worker.gpu.sample.gumbel": ("gumbel_sample",),
    "vllm.v1.worker.gpu.sample.output": ("SamplerOutput",),
    "vllm.v1.worker.gpu.sample.sampler": ("Sampler",),
}


def __getattr__(name: str) -> Any:
    return resolve(MODULES, name)


# What `--quantization` may be once vLLM has looked at the checkpoint. MXFP4 stays packed, BF16 becomes FP8 by fp8.
QUANTIZATIONS = (None, "gpt_oss_mxfp4", "fp8")
DRAFTERS = ("ngram", "eagle3")  # methods of --speculative-config
# what vLLM calls the official checkpoint's format once it has looked at it: it has several others of that name
_OFFICIAL = {"gpt_oss_mxfp4": "mxfp4"}


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """config: vLLM's copy of config.json. Returns it with the format's name as the checkpoint has it."""
    form = config.get("quantization_config")
    if not isinstance(form, dict) or form.get("quant_method") not in _OFFICIAL:
        return config
    return config | {"quantization_config": form | {"quant_method": _OFFICIAL[form["quant_method"]]}}


def register_formats() -> None:
    """None: vLLM hands the checkpoint's tensors over as they are."""


def request_classes() -> tuple[type, ...]:
    """The classes by which vLLM reads a request that generates."""
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    chats = (ChatCompletionRequest, BatchChatCompletionRequest, AnthropicMessagesRequest)
    return (*chats, CompletionRequest, ResponsesRequest)


def unavailable(said: str) -> Exception:
    """What a route raises to answer with status 503."""
    from vllm.exceptions import GracefulHTTPError

    return GracefulHTTPError(said, HTTPStatus.SERVICE_UNAVAILABLE)


def load_tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)


def validate_structure(params: Any, vllm_config: Any, tokenizer: Any) -> None:
    """vLLM's own validation of SamplingParams with a structure, which chooses the backend. Raises what vLLM raises."""
    from vllm.sampling_params import SamplingParams

    from npu_gptoss.serving.compat.patch import stock

    stock(SamplingParams._validate_structured_outputs)(
        params, vllm_config.model_config, vllm_config.structured_outputs_config, tokenizer
    )


def structure_key(params: Any) -> tuple[Any, str]:
    """The first two arguments of a backend's `compile_grammar`."""
    from vllm.v1.structured_output.request import get_structured_output_key

    return get_structured_output_key(params.structured_outputs)


def profiler_options(folder: str) -> dict[str, Any]:
    """Options of `LLM` that write a trace to `folder`."""
    return {"profiler_config": {"profiler": "torch", "torch_profiler_dir": folder}}


# of a server's ObservabilityConfig: the user left --cudagraph-metrics out, and vLLM prints no table of its own
_UNASKED = "npu_gptoss_counts_steps"


def count_steps(vllm_config: Any) -> None:
    """Have the engines' statistics report their steps, as --cudagraph-metrics does."""
    observed = vllm_config.observability_config
    if not observed.cudagraph_metrics:
        observed.cudagraph_metrics = True
        setattr(observed, _UNASKED, True)


def counts_steps(vllm_config: Any) -> bool:
    """Whether the statistics of this server's engines report their steps.

    Called when the engines have the configuration and vLLM's own logger has not: it would print a table that nobody
    asked for.
    """
    observed = vllm_config.observability_config
    counted = observed.cudagraph_metrics
    if getattr(observed, _UNASKED, False):
        observed.cudagraph_metrics = False
    return counted or getattr(observed, _UNASKED, False)


def step_of(scheduler_stats: Any) -> Step | None:
    """What the step of a SchedulerStats was; the kernels are taken out."""
    told = getattr(scheduler_stats, "cudagraph_stats", None)
    if told is None:
        return None
    name, kernels = without_kernels(told.runtime_mode)
    scheduler_stats.cudagraph_stats = dataclasses.replace(told, runtime_mode=name)
    mode = name.rpartition(".")[2].lower()
    if mode not in MODES:  # NONE
        return Step(EAGER, 0, told.num_unpadded_tokens, told.num_paddings, kernels)
    return Step(mode, told.num_padded_tokens, told.num_unpadded_tokens, told.num_paddings, kernels)
