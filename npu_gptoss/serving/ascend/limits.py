"""What gpt-oss cannot have on this vllm-ascend, said before anything is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from npu_gptoss import envs
from npu_gptoss.serving import lines

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

_ON = ("1", "true", "True")


def installed() -> str | None:
    """The version of the installed vllm-ascend; None when it has no metadata."""
    return lines.installed("vllm-ascend", "vllm_ascend")


def version_objection(release: str | None) -> str | None:
    """Why this vllm-ascend is outside of the window, in words; None when it is inside."""
    window = lines.here().vllm_ascend
    if window.has(release):
        return None
    found = f"vllm-ascend {release}" if release else "a vllm-ascend without a version"
    served = f"{window.releases[0]} to {window.releases[-1]}"
    return f"{found}: gpt-oss is served on vllm-ascend {served}; install {window.recommended}"


def operator_objection() -> str | None:
    """Why torch_npu's attention operator does not do; looks at its registered schema and at no device."""
    import torch
    import torch_npu

    name = "npu_fused_infer_attention_score_v2"
    remedy = f"install torch-npu {lines.here().torch_npu.recommended} (made for CANN 8.3)"
    release = getattr(torch_npu, "__version__", "of unknown version")
    overloads = getattr(torch.ops.npu, name, None)
    if overloads is None:
        return f"torch-npu {release} has no {name}; {remedy}"
    if "learnable_sink" not in {argument.name for argument in overloads.default._schema.arguments}:
        return f"{name} of torch-npu {release} has no learnable_sink, and gpt-oss attends with sinks; {remedy}"
    return None


def _option_objections(options: Mapping[str, Any]) -> list[str]:
    """What --additional-config asks vllm-ascend for."""

    def part(name: str, key: str) -> bool:
        return bool((options.get(name) or {}).get(key))

    table = [
        (options.get("kv_cache_dtype") not in (None, "auto"), "kv_cache_dtype", "the KV cache has the model's dtype"),
        (part("torchair_graph_config", "enabled"), "torchair_graph_config", "graphs are ACL graphs"),
        (part("weight_prefetch_config", "enabled"), "weight_prefetch_config", "it looks for weights of other models"),
        (options.get("dynamic_eplb"), "dynamic_eplb", "experts do not move between ranks"),
        (options.get("expert_map_path"), "expert_map_path", "experts are placed in order"),
        (options.get("expert_map_record_path"), "expert_map_record_path", "experts do not move between ranks"),
        (options.get("init_redundancy_expert"), "init_redundancy_expert", "each expert lives on one rank"),
        (options.get("enable_shared_expert_dp"), "enable_shared_expert_dp", "there are no shared experts"),
    ]
    return [f"--additional-config {name}: {why}; leave it out" for wrong, name, why in table if wrong]


def _environment_objections() -> list[str]:
    refused = {
        "VLLM_ASCEND_ENABLE_FLASHCOMM": "sequence parallelism is not supported",
        "VLLM_ASCEND_ENABLE_FLASHCOMM1": "sequence parallelism is not supported",
        "VLLM_ASCEND_ENABLE_PREFETCH_MLP": "it looks for weights of other models",
    }
    return [f"{name}=1: {why}; unset it" for name, why in refused.items() if os.environ.get(name) in _ON]


def _has_graphs(config: VllmConfig) -> bool:
    """Asked before vLLM has filled in its default, which is to capture."""
    from npu_gptoss.serving.lines.vllm import CUDAGraphMode

    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def _scheduling_objections(config: VllmConfig) -> list[str]:
    """vllm-ascend 0.11.0 replays without waiting for the replay before it (mended in its #4233, #5966): wrong text or,
    with full graphs, a hang. What waits by chance, the copy of each step's tokens, is what this option leaves out."""
    if not config.scheduler_config.async_scheduling or not _has_graphs(config):
        return []
    return [
        "--async-scheduling: vllm-ascend 0.11.0 starts the next graph before the last one has ended, for wrong text or "
        "a hang; leave it out, or use --enforce-eager"
    ]


def _kernel_objections(config: VllmConfig) -> list[str]:
    """Experts by plain torch operators ask the device how many rows each expert has: right, and in no graph."""
    from npu_gptoss.kernels.registry import registry
    from npu_gptoss.kernels.selection import override_for
    from npu_gptoss.moe.operations import EXPERTS

    asked = override_for(EXPERTS)
    slow = [kernel for kernel in registry.kernels_of(EXPERTS) if kernel.solution in ("small_ops", "reference")]
    if not _has_graphs(config) or asked not in {name for kernel in slow for name in (kernel.name, kernel.solution)}:
        return []
    variable = f"{envs.KERNEL_OVERRIDE_PREFIX}{EXPERTS.family}_{EXPERTS.mode}".upper()
    return [f"{variable}={asked}: it asks the device in every step, which no graph takes; use --enforce-eager"]


def objections(config: VllmConfig) -> list[str]:
    """Each as "what was got; what to do instead"; empty when gpt-oss can run."""
    found = [objection for objection in (version_objection(installed()), operator_objection()) if objection]
    if config.compilation_config.pass_config.enable_sequence_parallelism:
        found.append("enable_sequence_parallelism: not supported; leave it out")
    options = _option_objections(config.additional_config or {})
    return found + options + _environment_objections() + _scheduling_objections(config) + _kernel_objections(config)


def dtypes() -> tuple[str, ...]:
    """The operator with sinks takes bfloat16; the emulated one float32 too, on demand."""
    return ("bfloat16", "float32") if envs.get("ASCEND_EMULATOR_FP32") else ("bfloat16",)
