"""What this port of gpt-oss does not do, said before anything is loaded.

vLLM asks a model's config class to verify the whole configuration when it is put together, in the process that the user
started. Ours adds refusals to vLLM's own class for gpt-oss; `checked_config` is called once more by the model.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from npu_gptoss.errors import InputError
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.serving.ascend import limits as ascend
from npu_gptoss.serving.cuda import limits as cuda

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

logger = logging.getLogger("vllm.npu_gptoss")

LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy")


def objections(config: VllmConfig, device_type: str) -> list[str]:
    """What is asked for and cannot be had, each as "what was got; what to do instead"."""
    from npu_gptoss.serving.lines.vllm import DRAFTERS, QUANTIZATIONS

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    dtypes = ascend.dtypes() if device_type == "npu" else ("bfloat16", "float32")
    found = []
    if dtype not in dtypes:
        found += [f"--dtype {dtype}: gpt-oss runs in {' or '.join(dtypes)} on {device_type}; use --dtype {dtypes[0]}"]
    if (asked := config.load_config.load_format) not in LOAD_FORMATS:
        found += [f"--load-format {asked}: weights come from safetensors; use --load-format auto"]
    if config.lora_config is not None:
        found += ["--enable-lora: adapters are not supported; merge them into the checkpoint"]
    contexts = parallel.decode_context_parallel_size
    refused = {
        f"--quantization {model.quantization}: the checkpoint says whether it is MXFP4 or BF16": (
            model.quantization not in QUANTIZATIONS
        ),
        f"--kv-cache-dtype {cache.cache_dtype}: the KV cache has the model's dtype": (
            cache.cache_dtype != "auto" or getattr(cache, "calculate_kv_scales", False)
        ),
        f"--speculative-config: {' and '.join(DRAFTERS) + ' draft here' if DRAFTERS else 'not supported'}": (
            config.speculative_config is not None and config.speculative_config.method not in DRAFTERS
        ),
        f"--runner {model.runner_type}: this port generates text": model.runner_type != "generate",
        "--disable-sliding-window: every other layer was trained with its window": model.disable_sliding_window,
        "--enable-eplb: experts do not move between ranks": parallel.enable_eplb,
        "--enable-dbo: not supported": parallel.enable_dbo,
        f"--decode-context-parallel-size {contexts}: not supported": contexts > 1,
        "--kv-sharing-fast-prefill: no layer shares its KV cache": cache.kv_sharing_fast_prefill,
    }
    found += [f"{sentence}; leave it out" for sentence, wrong in refused.items() if wrong]
    beside = {"npu": ascend.objections, "cuda": cuda.objections}.get(device_type)
    return found + (beside(config) if beside else [])


def checked_config(config: VllmConfig) -> GptOssConfig:
    """The checkpoint's config.json as vLLM holds it, overrides included, once nothing speaks against serving it.

    Raises InputError with every objection at once, and logs the sentence, because vLLM wraps the exception in its own.
    """
    from npu_gptoss.serving.lines.vllm import as_written, current_platform

    found = objections(config, current_platform.device_type)
    try:
        checked = GptOssConfig.from_dict(as_written(config.model_config.hf_config.to_dict()))
    except InputError as error:
        found.append(f"config.json of {config.model_config.model}: {str(error).rstrip('.')}")
    if found:
        sentence = "npu-gptoss cannot serve this. " + " ".join(f"{objection}." for objection in found)
        logger.error("%s", sentence)
        raise InputError(sentence)
    return checked


def register(architecture: str) -> None:
    """Puts our verification before vLLM's own of this architecture. Idempotent."""
    from npu_gptoss.serving.ascend import sizes as ascend_sizes
    from npu_gptoss.serving.lines.vllm import MODELS_CONFIG_MAP, count_steps, current_platform

    known = MODELS_CONFIG_MAP[architecture]
    if getattr(known, "limits_of_npu_gptoss", False):
        return

    class GptOssLimits(known):
        limits_of_npu_gptoss = True

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            checked_config(vllm_config)
            count_steps(vllm_config)
            if current_platform.device_type == "npu":
                ascend_sizes.cap(vllm_config)
                ascend.choose_graphs(vllm_config)
            elif current_platform.device_type == "cuda":
                cuda.choose_graphs()
            known.verify_and_update_config(vllm_config)

    MODELS_CONFIG_MAP[architecture] = GptOssLimits
