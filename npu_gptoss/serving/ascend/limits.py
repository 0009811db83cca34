"""What gpt-oss cannot have on this vllm-ascend, said before anything is loaded."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
from typing import TYPE_CHECKING

from npu_gptoss import cann, envs
from npu_gptoss.serving import lines

if TYPE_CHECKING:
    from npu_gptoss.serving.lines.vllm import VllmConfig

logger = logging.getLogger("vllm.npu_gptoss")

# of --additional-config, each with why not
OPTIONS = {
    "kv_cache_dtype": "the KV cache has the model's dtype",
    "torchair_graph_config.enabled": "graphs are ACL graphs",
    "weight_prefetch_config.enabled": "it looks for weights of other models",
    "dynamic_eplb": "experts do not move between ranks",
    "expert_map_path": "experts are placed in order",
    "expert_map_record_path": "experts do not move between ranks",
    "init_redundancy_expert": "each expert lives on one rank",
    "enable_shared_expert_dp": "there are no shared experts",
}
VARIABLES = {
    "VLLM_ASCEND_ENABLE_FLASHCOMM": "sequence parallelism is not supported",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "sequence parallelism is not supported",
    "VLLM_ASCEND_ENABLE_PREFETCH_MLP": "it looks for weights of other models",
}
_ON = ("1", "true", "True")


def installed() -> str | None:
    """The version of the installed vllm-ascend; None when it has no metadata."""
    return lines.installed("vllm-ascend", "vllm_ascend")


def version_objection(release: str | None, line: lines.Line | None = None) -> str | None:
    """Why this vllm-ascend is outside of the window, in words; None when it is inside."""
    window = (line or lines.ascend_line()).vllm_ascend
    if window.has(release):
        return None
    found = f"vllm-ascend {release}" if release else "a vllm-ascend without a version"
    served = " to ".join(dict.fromkeys((window.releases[0], window.releases[-1])))
    return f"{found}: gpt-oss is served on vllm-ascend {served}; install {window.recommended}"


def operator_objection() -> str | None:
    """Why torch_npu's attention operator does not do; looks at its registered schema and at no device."""
    import torch
    import torch_npu

    name = "npu_fused_infer_attention_score_v2"
    line = lines.ascend_line()
    remedy = f"install torch-npu {line.torch_npu.recommended} (made for CANN {line.cann.recommended})"
    release = getattr(torch_npu, "__version__", "of unknown version")
    overloads = getattr(torch.ops.npu, name, None)
    if overloads is None:
        return f"torch-npu {release} has no {name}; {remedy}"
    if "learnable_sink" not in {argument.name for argument in overloads.default._schema.arguments}:
        return f"{name} of torch-npu {release} has no learnable_sink, and gpt-oss attends with sinks; {remedy}"
    return None


def cann_objection() -> str | None:
    """Why the installed CANN would compute wrongly without a word, as far as its files tell."""
    place, _ = cann.find_toolkit()
    text = cann.toolkit_version(place) if place else ""
    wrong = cann.defect(text, cann.built(place)) if place else None
    return f"CANN {text} ({place}) is {wrong}; install CANN {lines.ascend_line().cann.recommended}" if wrong else None


def triton_objection() -> str | None:
    """Why a step cannot launch its Triton kernels: where vLLM finds no Triton it leaves them as Python functions."""
    from npu_gptoss.serving.lines.ascend import LAUNCHED

    kernels = {name: getattr(importlib.import_module(module), name) for module, name in LAUNCHED}
    plain = [name for name, kernel in kernels.items() if not hasattr(kernel, "__getitem__")]
    if not plain:
        return None
    line = lines.ascend_line()
    found = lines.installed("triton-ascend")
    got = f"triton-ascend {found} is installed and vLLM does not use it" if found else "triton-ascend is not installed"
    return (
        f"{got}, and vLLM {line.vllm.recommended} launches {plain[0]} in every step: the first request would end the "
        f"server with a TypeError; {triton_remedy(line)}"
    )


def triton_remedy(line: lines.Line) -> str:
    wanted = line.triton_ascend
    command = f"pip install --no-deps triton-ascend=={wanted.recommended}"
    return f"`{command}` (vllm-ascend's own image has {wanted.releases[-1]})"


def event_objection() -> str | None:
    """Why captured attention calls cannot wait for their lengths; loads torch_npu, and opens no device.

    torch-npu from 2.10 on makes an external event of a value in device memory. Where CANN has not the two calls for
    that, what waits for an event before it is recorded is dropped, and a replayed call may read its lengths too early.
    """
    import torch_npu

    if not lines.ascend_line().torch_npu.recommended.startswith("2.10"):
        return None
    library = ctypes.CDLL("libascendcl.so")
    missing = [name for name in ("aclrtValueWait", "aclrtValueWrite") if not hasattr(library, name)]
    if not missing:
        return None
    return (
        f"CANN's libascendcl.so has no {' and no '.join(missing)}, and with torch-npu {torch_npu.__version__} a "
        f"replayed graph does not wait for its lengths; install CANN {lines.ascend_line().cann.recommended}"
    )


def _has_graphs(config: VllmConfig) -> bool:
    """Asked before vLLM has filled in its default, which is to capture."""
    from npu_gptoss.serving.lines.vllm import CUDAGraphMode

    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def _scheduling_objection(config: VllmConfig) -> str | None:
    from npu_gptoss.serving.lines.ascend import REPLAYS_IN_ORDER

    if REPLAYS_IN_ORDER or not config.scheduler_config.async_scheduling:
        return None
    return (
        "--async-scheduling: vllm-ascend 0.11.0 starts the next graph before the last one has ended, for wrong text or "
        "a hang; leave it out, or use --enforce-eager"
    )


def _experts_objection(config: VllmConfig) -> str | None:
    """vllm-ascend's dispatch takes a rank's first expert for rank * experts here, which it is for even shares alone:
    others got the rows of experts that they do not have, and computed them by those that they have."""
    parallel, experts = config.parallel_config, config.model_config.hf_config.num_local_experts
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    if not parallel.enable_expert_parallel or experts % ranks == 0:
        return None
    return (
        f"--enable-expert-parallel on {ranks} ranks: vllm-ascend deals out {experts} experts rightly to ranks that "
        "divide them; use as many, or leave it out"
    )


def choose_graphs(config: VllmConfig) -> None:
    """The line's choice where the user made none."""
    from npu_gptoss.serving.lines.ascend import GRAPHS
    from npu_gptoss.serving.lines.vllm import CUDAGraphMode

    if GRAPHS and config.compilation_config.cudagraph_mode is None and _has_graphs(config):
        config.compilation_config.cudagraph_mode = CUDAGraphMode[GRAPHS]


def _kernel_objections() -> list[str]:
    """Experts by plain torch operators ask the device, for the rows of each or for the scales of packed ones: right,
    and in no graph."""
    from npu_gptoss.kernels.registry import registry
    from npu_gptoss.kernels.selection import override_for, override_variable
    from npu_gptoss.moe.operations import EXPERTS
    from npu_gptoss.moe.packed import EXPAND

    found = []
    for operation in (EXPERTS, EXPAND):
        asked = override_for(operation)
        slow = [one for one in registry.kernels_of(operation) if one.solution in ("small_ops", "reference")]
        if asked in {name for kernel in slow for name in (kernel.name, kernel.solution)}:
            why = "it asks the device in every step, which no graph takes"
            found.append(f"{override_variable(operation)}={asked}: {why}; unset it, or use --enforce-eager")
    return found


def objections(config: VllmConfig) -> list[str]:
    """Each as "what was got; what to do instead"; empty when gpt-oss can run."""
    from npu_gptoss.serving.lines.vllm import sequence_parallelism

    found = [version_objection(installed()), cann_objection(), operator_objection(), triton_objection()]
    if sequence_parallelism(config):
        found.append("enable_sequence_parallelism: not supported; leave it out")
    for name, why in OPTIONS.items():
        option, _, part = name.partition(".")
        value = (config.additional_config or {}).get(option)
        if part:
            value = (value or {}).get(part)
        if value and value != "auto":
            found.append(f"--additional-config {option}: {why}; leave it out")
    found += [f"{name}=1: {why}; unset it" for name, why in VARIABLES.items() if os.environ.get(name) in _ON]
    found.append(_experts_objection(config))
    if _has_graphs(config):
        found += [_scheduling_objection(config), *_kernel_objections()]
    return [objection for objection in found if objection]


def dtypes() -> tuple[str, ...]:
    """The operator with sinks takes bfloat16; the emulated one float32 too, on demand."""
    return ("bfloat16", "float32") if envs.get("ASCEND_EMULATOR_FP32") else ("bfloat16",)
