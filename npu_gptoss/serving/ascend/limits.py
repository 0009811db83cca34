"""Settings and packages that gpt-oss on Ascend refuses, before it loads anything."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from npu_gptoss import cann, envs
from npu_gptoss.errors import Refusal
from npu_gptoss.serving import logger, releases
from npu_gptoss.serving.ascend import sizes

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig


# Fields of --additional-config, each with the reason for its refusal
OPTIONS = {
    "kv_cache_dtype": "the KV cache has the model's dtype",
    "torchair_graph_config.enabled": "graphs are ACL graphs",
    "weight_prefetch_config.enabled": "it looks for weights of other models",
    "dynamic_eplb": "experts do not move between ranks",
    "expert_map_path": "experts are placed in order",
    "expert_map_record_path": "experts do not move between ranks",
    "eplb_config.dynamic_eplb": "experts do not move between ranks",
    "eplb_config.expert_map_path": "experts are placed in order",
    "xlite_graph_config.enabled": "its graphs are made for other models, and need a package of their own",
    "init_redundancy_expert": "each expert lives on one rank",
    "enable_shared_expert_dp": "there are no shared experts",
    "enable_flashcomm1": "sequence parallelism is not supported",
}
VARIABLES = {
    "VLLM_ASCEND_ENABLE_FLASHCOMM": "sequence parallelism is not supported",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "sequence parallelism is not supported",
    "VLLM_ASCEND_ENABLE_PREFETCH_MLP": "it looks for weights of other models",
    "VLLM_USE_V2_MODEL_RUNNER": "vllm-ascend keeps its first model runner here, but asks for parts of the second",
}
SEQUENCES = "pass_config.enable_sequence_parallelism"
_OFF = ("", "0", "false", "False")
_OPERATOR = "npu_fused_infer_attention_score_v2"


def installed() -> str | None:
    """Returns the version of the installed vllm-ascend; None without metadata."""
    return releases.installed("vllm-ascend", "vllm_ascend")


def version_objection(
    release: str | None,
    row: releases.Release | None = None,
    folder: Callable[[str], Path | None] = releases.package_folder,
) -> Refusal | None:
    """Returns the refusal of a vllm-ascend that lacks what this package touches; None if it has that.

    Without the files (`folder` as `releases.package_folder`) the name decides.
    """
    from npu_gptoss.serving.releases import seams

    row = row or releases.ascend_release()
    window = row.vllm_ascend
    served = " to ".join(dict.fromkeys((window.releases[0], window.releases[-1])))
    why = f"gpt-oss is served on vllm-ascend {served}"
    if folder(seams.PACKAGE) is not None:
        wrong = [misfit.sentence for misfit in seams.misfits(row, folder) if misfit.needed]
        why += f" and builds that share what this package touches; here {'; '.join(wrong[:3])}"
        why += f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    else:
        wrong = [] if window.has(release) else [why]
    if not wrong:
        return None
    return Refusal("vllm-ascend", release or "without a version", why, f"install vllm-ascend {window.recommended}")


def operator_objection() -> Refusal | None:
    """Returns the refusal of a torch-npu without the attention operator; reads its schema, opens no device."""
    import torch
    import torch_npu

    row = releases.ascend_release()
    remedy = f"install torch-npu {row.torch_npu.recommended} (made for CANN {row.cann.recommended})"
    release = getattr(torch_npu, "__version__", "of unknown version")
    overloads = getattr(torch.ops.npu, _OPERATOR, None)
    if overloads is None:
        return Refusal("torch-npu", release, f"it has no {_OPERATOR}", remedy)
    if "learnable_sink" not in {argument.name for argument in overloads.default._schema.arguments}:
        why = f"its {_OPERATOR} has no learnable_sink, and gpt-oss attends with sinks"
        return Refusal("torch-npu", release, why, remedy)
    return None


def cann_objection() -> Refusal | None:
    """Returns the refusal of a CANN with silently wrong results, by its files."""
    place, _ = cann.find_toolkit()
    text = cann.toolkit_version(place) if place else ""
    if not place or not (wrong := cann.defect(text, cann.built(place))):
        return None
    remedy = f"install CANN {releases.ascend_release().cann.recommended}"
    return Refusal("CANN", f"{text} ({place})", f"it is {wrong}", remedy)


def triton_objection() -> Refusal | None:
    """Returns the refusal of a stack without its Triton: vLLM then has plain functions as kernels, and a step fails."""
    from npu_gptoss.serving.releases.ascend import LAUNCHED

    kernels = {name: getattr(importlib.import_module(module), name) for module, name in LAUNCHED}
    plain = [name for name, kernel in kernels.items() if not hasattr(kernel, "__getitem__")]
    if not plain:
        return None
    row = releases.ascend_release()
    found = releases.installed("triton-ascend")
    why = f"it is {'installed and vLLM does not use it' if found else 'not installed'}, and vLLM"
    why += f" {row.vllm.recommended} launches {plain[0]} in every step: the first request would end the server"
    return Refusal("triton-ascend", found, why, f"run {triton_remedy(row)}")


def other_triton() -> Refusal | None:
    """Returns the reason against packed experts by the installed Triton-Ascend: it is made for another CANN."""
    row, found = releases.ascend_release(), releases.installed("triton-ascend")
    if found is None or row.triton_ascend.has(found):
        return None
    why = f"it is not made for CANN {row.cann.recommended}, whose compiler may refuse the kernel of packed experts"
    return Refusal("triton-ascend", found, why, f"run {triton_remedy(row)}")


def triton_remedy(row: releases.Release, python: tuple[int, ...] = sys.version_info[:2]) -> str:
    wanted = row.triton_ascend
    if python >= (3, 12):  # 3.2.0 has no wheel for it
        return f"`pip install --no-deps triton-ascend=={wanted.releases[-1]}` from Ascend's package index"
    command = f"pip install --no-deps triton-ascend=={wanted.recommended}"
    has = f" (vllm-ascend's own image has {wanted.releases[-1]})" if len(wanted.releases) > 1 else ""
    return f"`{command}`{has}"


def event_objection() -> Refusal | None:
    """Returns the refusal of full decode graphs whose attention calls cannot wait for their lengths.

    Loads torch_npu and opens no device.

    torch-npu from 2.10 on makes an external event from a value in device memory. If CANN lacks the two calls for it, a
    wait that precedes the event's record is dropped, and a replayed call may read its lengths too early.
    """
    import torch_npu

    if not releases.ascend_release().torch_npu.recommended.startswith("2.10"):
        return None
    library = ctypes.CDLL("libascendcl.so")
    missing = [name for name in ("aclrtValueWait", "aclrtValueWrite") if not hasattr(library, name)]
    if not missing:
        return None
    why = f"with torch-npu {torch_npu.__version__} a replayed graph does not wait for its lengths"
    remedy = f"install CANN {releases.ascend_release().cann.recommended}"
    return Refusal("CANN", f"without {' and '.join(missing)} in libascendcl.so", why, remedy)


def _has_graphs(config: VllmConfig) -> bool:
    """True also before vLLM has filled in its default, which is to capture."""
    from npu_gptoss.serving.releases.vllm import CUDAGraphMode

    return not config.model_config.enforce_eager and config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE


def choose_graphs(config: VllmConfig) -> None:
    """Sets the release's default if the user chose none, and another mode for one whose replays have no order."""
    from npu_gptoss.serving.releases.ascend import WITHOUT_ORDER, default_graphs, runs_ahead
    from npu_gptoss.serving.releases.vllm import CUDAGraphMode

    compilation = config.compilation_config
    if not _has_graphs(config):
        return
    if slower := sizes.shortfall(config):
        logger.warning("%s", slower)
    if compilation.cudagraph_mode is None and (mode := default_graphs(config)):
        compilation.cudagraph_mode = CUDAGraphMode[mode]
    chosen = compilation.cudagraph_mode and compilation.cudagraph_mode.name
    if chosen in WITHOUT_ORDER and runs_ahead(config):
        logger.warning(
            "%s with asynchronous scheduling becomes FULL_DECODE_ONLY: vllm-ascend does not wait before it replays the "
            "pieces of a mixed step, which may compute wrong text. --no-async-scheduling keeps it.",
            chosen,
        )
        compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY


def _kernel_checks(graphs: bool) -> Iterator[tuple[bool, Refusal]]:
    """Refuses plain torch operators in graphs: they are correct but read each expert's rows, or packed scales, from the
    device, which no graph can capture."""
    from npu_gptoss.kernels.registry import registry
    from npu_gptoss.kernels.selection import override_for, override_variable
    from npu_gptoss.moe.operations import EXPERTS
    from npu_gptoss.moe.packed import EXPAND

    for operation in (EXPERTS, EXPAND):
        asked = override_for(operation)
        slow = [kernel for kernel in registry.kernels_of(operation) if kernel.solution in ("small_ops", "reference")]
        wrong = graphs and asked in {name for kernel in slow for name in (kernel.name, kernel.solution)}
        why = "it reads from the device in every step, which no graph can capture"
        yield wrong, Refusal(override_variable(operation), asked, why, "unset it, or use --enforce-eager")


def checks(config: VllmConfig) -> Iterator[tuple[bool, Refusal]]:
    """Yields each refusal, with True if this configuration or machine asks for it."""
    from npu_gptoss.serving.releases.ascend import REPLAYS_IN_ORDER
    from npu_gptoss.serving.releases.vllm import DRAFTERS, HAS_TRITON, sequence_parallelism

    for found in (version_objection(installed()), cann_objection(), operator_objection(), triton_objection()):
        if found:
            yield True, found
    parallel, experts = config.parallel_config, config.model_config.hf_config.num_local_experts
    graphs = _has_graphs(config)
    why = "sequence parallelism is not supported"
    yield sequence_parallelism(config), Refusal("--compilation-config", SEQUENCES, why)
    for name, why in OPTIONS.items():
        option, _, part = name.partition(".")
        value = (config.additional_config or {}).get(option)
        if part:
            value = (value or {}).get(part)
        yield bool(value) and value != "auto", Refusal("--additional-config", name, why)
    for name, why in VARIABLES.items():
        value = os.environ.get(name, "")
        yield value not in _OFF, Refusal(name, value, why, "unset it")
    # vllm-ascend takes rank * (experts here) as a rank's first expert. For uneven shares that is wrong: ranks got the
    # rows of other ranks' experts and computed wrong answers.
    ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
    wrong = parallel.enable_expert_parallel and experts % ranks != 0
    why = f"vllm-ascend distributes {experts} experts correctly only over a number of ranks that divides them"
    remedy = "use as many ranks, or leave it out"
    yield wrong, Refusal("--enable-expert-parallel", f"on {ranks} ranks", why, remedy)
    stages, drafter = parallel.pipeline_parallel_size, config.speculative_config
    # a request whose drafts are being checked has fewer tokens left than none, and vLLM 0.23 schedules as many
    why = "with drafts vLLM plans a request's next step before the last stage has checked them: wrong answers, or none"
    drafts = drafter is not None and drafter.method in DRAFTERS  # others are refused on every device
    remedy = "leave out this or --speculative-config"
    yield drafts and stages > 1, Refusal("--pipeline-parallel-size", stages, why, remedy)
    head = drafts and drafter.method == "eagle3"
    why = "a head's rotary table is not the model's, and CANN's rotary operator keeps the first table of a process"
    remedy = "install triton-ascend, which has a kernel for it (emulated: `--triton .venv-ascend-compiler`)"
    yield head and not HAS_TRITON, Refusal("--speculative-config", "with eagle3", why, remedy)
    why, remedy = "the weights of a running server stay as they are", "leave it out, and restart for other weights"
    sent = getattr(config, "weight_transfer_config", None) is not None  # from vLLM 0.23 on
    yield sent, Refusal("--weight-transfer-config", None, why, remedy)
    wrong = graphs and not REPLAYS_IN_ORDER and config.scheduler_config.async_scheduling
    why = "vllm-ascend 0.11.0 starts the next graph before the last one has ended, which gives wrong text or a hang"
    yield wrong, Refusal("--async-scheduling", None, why, "leave it out, or use --enforce-eager")
    yield from _kernel_checks(graphs)


def dtypes() -> tuple[str, ...]:
    """Returns the operator's dtypes: bfloat16, and float32 on the emulator on demand."""
    return ("bfloat16", "float32") if envs.get("ASCEND_EMULATOR_FP32") else ("bfloat16",)
