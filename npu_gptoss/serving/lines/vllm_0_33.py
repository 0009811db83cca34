"""vLLM 0.33.0, on NVIDIA GPUs: where its names are.

It brings all that the model of `serving.cuda` rides on: groups of KV cache blocks for layers with a window, and CUDA
graphs that break off at a function, without torch.compile. A step's lengths are on the device, with bounds on the host.
"""

from __future__ import annotations

from typing import Any

from npu_gptoss.serving.lines import resolve

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
    "vllm.forward_context": ("ForwardContext", "get_forward_context"),
    "vllm.model_executor.layers.attention_layer_base": ("AttentionLayerBase",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("ParallelLMHead",),
    "vllm.model_executor.models.config": ("MODELS_CONFIG_MAP",),
    "vllm.model_executor.models.interfaces": ("SupportsEagle3",),
    "vllm.platforms": ("current_platform",),
    "vllm.plugins": ("load_general_plugins",),
    "vllm.v1.attention.backend": (
        "AttentionBackend",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "CommonAttentionMetadata",
    ),
    "vllm.v1.kv_cache_interface": ("AttentionSpec", "FullAttentionSpec", "KVCacheLayout", "SlidingWindowSpec"),
    "vllm.v1.metrics.loggers": ("StatLoggerBase",),
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
