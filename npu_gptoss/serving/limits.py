"""Settings of vLLM that this port of gpt-oss refuses, before it loads anything.

vLLM asks a model's config class to verify the whole configuration, in the process that the user started. Our class adds
refusals to vLLM's own for gpt-oss; the model calls `checked_config` once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from npu_gptoss.errors import InputError, Refusal, asked_for, short
from npu_gptoss.model.config import ConfigError, GptOssConfig
from npu_gptoss.model.config_fields import ARCHITECTURE, MODEL_TYPE, MXFP4
from npu_gptoss.serving import aside
from npu_gptoss.serving.ascend import limits as ascend
from npu_gptoss.serving.compat.start import ends
from npu_gptoss.serving.cuda import limits as cuda

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

LOAD_FORMATS = ("auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy")


def checks(config: VllmConfig, device_type: str) -> Iterator[tuple[bool, Refusal]]:
    """Yields each refusal, with True if this configuration asks for the setting. A new limit is one more row."""
    from npu_gptoss.serving.releases.vllm import DRAFTERS, QUANTIZATIONS

    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    dtype, load_format = str(model.dtype).removeprefix("torch."), config.load_config.load_format
    kv_dtype, kv_scales = cache.cache_dtype, getattr(cache, "calculate_kv_scales", False)
    contexts, drafter = parallel.decode_context_parallel_size, config.speculative_config
    drafters = f"{' and '.join(DRAFTERS)} draft here" if DRAFTERS else "no drafter is supported"
    dtypes = ascend.dtypes() if device_type == "npu" else ("bfloat16", "float32")
    why = f"gpt-oss runs in {' or '.join(dtypes)} on {device_type}"
    if (dtype, device_type) == ("float16", "npu"):  # 8.3 refuses; 9.1 has two checkers, and only one wants bfloat16
        why += "; that CANN's attention takes sinks in float16 is not settled: its sources contradict each other"
    generates = model.runner_type == "generate"
    wrong = dtype not in dtypes and generates  # vLLM chooses another for pooling
    yield wrong, Refusal("--dtype", dtype, why, f"use --dtype {dtypes[0]}")
    why = "weights come from safetensors"
    yield load_format not in LOAD_FORMATS, Refusal("--load-format", load_format, why, "use --load-format auto")
    remedy = f"run `npu-gptoss convert {short(model.model)} MERGED --lora ADAPTER` and serve MERGED"
    wrong = config.lora_config is not None and device_type != "cuda"
    yield wrong, Refusal("--enable-lora", None, "adapters are not supported", remedy)
    why = "the checkpoint's own format is served, MXFP4 or BF16"
    written = (getattr(model.hf_config, "quantization_config", None) or {}).get("quant_method")
    # of another format in config.json, its rule says so: nobody gave the flag
    wrong = model.quantization not in QUANTIZATIONS and written in (None, MXFP4, *QUANTIZATIONS)
    given = None if model.quantization == "ascend" else model.quantization  # vllm-ascend writes its own over any
    yield wrong, Refusal("--quantization", given, why)
    kv_dtypes = ("auto", dtype, *(cuda.FP8_CACHES if device_type == "cuda" else ()))
    why = "the KV cache has the model's dtype" + (" or is in FP8 (E4M3)" if device_type == "cuda" else "")
    yield kv_dtype not in kv_dtypes, Refusal("--kv-cache-dtype", kv_dtype, why)
    yield kv_scales, Refusal("--calculate-kv-scales", None, why)
    wrong = drafter is not None and drafter.method not in DRAFTERS
    yield wrong, Refusal("--speculative-config", None, drafters)
    yield not generates, Refusal("--runner", model.runner_type, "this port generates text")
    converted = generates and model.convert_type != "none"
    yield converted, Refusal("--convert", model.convert_type, "this port generates text")
    why = "every other layer was trained with its window"
    yield model.disable_sliding_window, Refusal("--disable-sliding-window", None, why)
    yield parallel.enable_eplb, Refusal("--enable-eplb", None, "experts do not move between ranks")
    yield parallel.enable_dbo, Refusal("--enable-dbo", None, "steps cannot be halved")
    yield contexts > 1, Refusal("--decode-context-parallel-size", contexts, "each rank keeps the whole context")
    outputs = getattr(config, "aux_output_config", model)  # of 0.33; 0.11 has no such option
    if getattr(outputs, "enable_return_routed_experts", False):
        yield True, Refusal("--enable-return-routed-experts", None, "the experts' kernels report no routes")
    yield cache.kv_sharing_fast_prefill, Refusal("--kv-sharing-fast-prefill", None, "no layer shares its KV cache")
    why = "another program would answer, without this package's chats, Responses, Messages and admission"
    yield ends.serves_in_rust(), Refusal(ends.RUST, 1, why, "unset it, or set NPU_GPTOSS=0")
    of_device = {"npu": ascend.checks, "cuda": cuda.checks}.get(device_type)
    yield from of_device(config) if of_device else ()


def head_layers(layers: Iterable[int], config: GptOssConfig) -> tuple[int, ...]:
    """Returns the layers behind which an EAGLE3 head reads; raises InputError if the model has not all of them."""
    layers = tuple(layers)
    if any(not 1 <= layer <= config.num_hidden_layers for layer in layers):
        got = f"a head that reads behind layers {', '.join(map(str, layers))}"
        why = f"the model has layers 1 to {config.num_hidden_layers}"
        raise InputError(Refusal("--speculative-config", got, why, "take a head that was trained for this model"))
    return layers


def objections(config: VllmConfig, device_type: str) -> list[Refusal]:
    return asked_for(checks(config, device_type))


def checked_config(config: VllmConfig) -> GptOssConfig:
    """Returns the checkpoint's config.json as vLLM holds it, overrides included, if nothing is refused.

    Raises InputError with every refusal at once.
    """
    from npu_gptoss.serving.releases.vllm import as_written, current_platform

    found = objections(config, current_platform.device_type)
    try:
        checked = GptOssConfig.from_dict(as_written(config.model_config.hf_config.to_dict()))
    except ConfigError as error:
        found += error.at(f"config.json of {config.model_config.model}").refusals
    if found:
        sentence = "npu-gptoss cannot serve this. " + " ".join(f"{refusal}." for refusal in found)
        raise InputError(sentence, refusals=tuple(found))
    return checked


def check_model(model: Any) -> None:
    """Raises InputError if vLLM would serve gpt-oss by another class than ours."""
    if model.hf_config.model_type == MODEL_TYPE and model.architecture != ARCHITECTURE:
        why = "this package's own model has gpt-oss's kernels"
        raise InputError(Refusal("--model-impl", model.model_impl, why))


def register(architecture: str) -> None:
    """Adds our verification before vLLM's own for this architecture. Idempotent."""
    from npu_gptoss.serving.ascend import sizes as ascend_sizes
    from npu_gptoss.serving.releases.vllm import MODELS_CONFIG_MAP, count_steps, current_platform

    known = MODELS_CONFIG_MAP[architecture]
    if getattr(known, "limits_of_npu_gptoss", False):
        return

    class GptOssLimits(known):
        limits_of_npu_gptoss = True

        @staticmethod
        def verify_and_update_config(vllm_config: VllmConfig) -> None:
            if not aside.stepped_aside():
                checked_config(vllm_config)
                count_steps(vllm_config)
                if current_platform.device_type == "npu":
                    ascend_sizes.cap(vllm_config)
                    ascend.choose_graphs(vllm_config)
                elif current_platform.device_type == "cuda":
                    cuda.choose_graphs()
                else:
                    from npu_gptoss.serving.releases import cpu_0_11

                    cpu_0_11.choose_operators(vllm_config)
            known.verify_and_update_config(vllm_config)

    MODELS_CONFIG_MAP[architecture] = GptOssLimits
