"""Names and signatures of vLLM 0.33.0, on NVIDIA GPUs, that differ between releases.

The model of `serving.cuda` needs two of its features: KV cache groups for layers with a window, and CUDA graphs that
break off at a function without torch.compile. A step's exact lengths are on the device; the host has upper limits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from unittest import mock

from npu_gptoss.serving.steps import EAGER, MODES, Step, without_kernels

if TYPE_CHECKING:
    import torch

    from npu_gptoss.serving.canary import Watch

# Names that serving imports from vLLM, by module.
MODULES: dict[str, str] = {
    "vllm": "ModelRegistry SamplingParams",
    "vllm.compilation.breakable_cudagraph": "eager_break_during_capture",
    "vllm.config": "CUDAGraphMode VllmConfig",
    "vllm.distributed": (
        "get_dp_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tp_group get_world_group "
        "tensor_model_parallel_all_gather tensor_model_parallel_all_reduce"
    ),
    "vllm.distributed.parallel_state": "graph_capture",
    "vllm.entrypoints.generate.base.protocol": "RequestResponseMetadata",
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest ChatCompletionResponse",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesResponse",
    "vllm.entrypoints.serve.engine.protocol": "ErrorInfo ErrorResponse UsageInfo",
    "vllm.entrypoints.serve.middleware.authenticate": "AuthenticationMiddleware",
    "vllm.entrypoints.serve.utils.api_utils": (
        "get_max_tokens load_aware_call validate_json_request with_cancellation"
    ),
    "vllm.exceptions": "LoRAAdapterNotFoundError",
    "vllm.forward_context": "ForwardContext get_forward_context",
    "vllm.lora.lora_model": "LoRAModel",
    "vllm.lora.model_manager": "AdapterLRUCache LRUCacheLoRAModelManager",
    "vllm.lora.utils": "get_adapter_absolute_path",
    "vllm.lora.worker_manager": "LRUCacheWorkerLoRAManager",
    "vllm.model_executor.layers.attention.kv_transfer_utils": "maybe_transfer_kv_layer",
    "vllm.model_executor.layers.attention_layer_base": "AttentionLayerBase",
    "vllm.model_executor.layers.vocab_parallel_embedding": "ParallelLMHead",
    "vllm.model_executor.models.config": "MODELS_CONFIG_MAP",
    "vllm.model_executor.models.interfaces": "SupportsEagle3 SupportsLoRA",
    "vllm.model_executor.warmup.jit_warmup": "JitWarmupRegistry VllmJitKernel",
    "vllm.platforms": "current_platform",
    "vllm.plugins": "load_general_plugins",
    "vllm.sampling_params": "StructuredOutputsParams",
    "vllm.utils.system_utils": "kill_process_tree",
    "vllm.utils.torch_utils": "kv_cache_dtype_str_to_dtype",
    "vllm.v1.attention.backend": (
        "AttentionBackend AttentionCGSupport AttentionMetadataBuilder CommonAttentionMetadata MultipleOf"
    ),
    "vllm.v1.core.sched.output": "NewRequestData",
    "vllm.v1.kv_cache_interface": ("AttentionSpec FullAttentionSpec KVCacheLayout SlidingWindowSpec get_kv_quant_mode"),
    "vllm.v1.metrics.loggers": "StatLoggerBase",
    "vllm.v1.outputs": "AsyncModelRunnerOutput ModelRunnerOutput",
    "vllm.v1.worker": "lora_model_runner_mixin",
    "vllm.v1.worker.block_table": "get_block_table_width",
    "vllm.v1.worker.gpu.model_states.default": "DefaultModelState",
    "vllm.v1.worker.gpu.sample.gumbel": "_log1p_neg_stable gumbel_sample murmur3_uniform32",
    "vllm.v1.worker.gpu.sample.output": "SamplerOutput",
    "vllm.v1.worker.gpu.sample.sampler": "Sampler",
}


# Values that `--quantization` may have after vLLM has read the checkpoint. MXFP4 stays packed; fp8 converts BF16.
QUANTIZATIONS = (None, "gpt_oss_mxfp4", "fp8")
DRAFTERS = ("ngram", "eagle3")  # methods of --speculative-config
# vLLM renames the official checkpoint's format after reading it: its name -> the checkpoint's
_OFFICIAL = {"gpt_oss_mxfp4": "mxfp4"}


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """config: vLLM's copy of config.json. Returns it with the checkpoint's name of the format."""
    form = config.get("quantization_config")
    if not isinstance(form, dict) or form.get("quant_method") not in _OFFICIAL:
        return config
    return config | {"quantization_config": form | {"quant_method": _OFFICIAL[form["quant_method"]]}}


def registered_model(module: str, name: str) -> Any:
    """Returns the entry of vLLM's registry for this class."""
    from vllm.model_executor.models.registry import _LazyRegisteredModel

    return _LazyRegisteredModel(module, name)


def register_formats() -> None:
    """Does nothing: vLLM passes the checkpoint's tensors on unchanged."""


def unavailable(said: str) -> Exception:
    """Returns the exception that makes a route answer with status 503."""
    from vllm.exceptions import GracefulHTTPError

    return GracefulHTTPError(said, HTTPStatus.SERVICE_UNAVAILABLE)


def load_tokenizer(model_config: Any) -> Any:
    from vllm.tokenizers import cached_tokenizer_from_config

    return cached_tokenizer_from_config(model_config=model_config)


VALIDATION_ARGUMENTS = ("self", "model_config", "structured_outputs_config", "tokenizer")


def validate_structure(params: Any, vllm_config: Any, tokenizer: Any) -> None:
    """Runs vLLM's validation of SamplingParams with a structure, which chooses the backend. Raises vLLM's errors."""
    from vllm.sampling_params import SamplingParams

    from npu_gptoss.serving.compat.patch import vllms_own
    from npu_gptoss.serving.releases import vllm  # 0.23 uses this function too

    configs = {name: getattr(vllm_config, name) for name in vllm.VALIDATION_ARGUMENTS if name.endswith("_config")}
    vllms_own(SamplingParams, "_validate_structured_outputs")(params, **configs, tokenizer=tokenizer)


def structure_key(params: Any) -> tuple[Any, str]:
    """Returns the first two arguments of a backend's `compile_grammar`."""
    from vllm.v1.structured_output.request import get_structured_output_key

    return get_structured_output_key(params.structured_outputs)


def profiler_options(folder: str) -> dict[str, Any]:
    """Returns the options of `LLM` that write a trace to `folder`."""
    return {"profiler_config": {"profiler": "torch", "torch_profiler_dir": folder}}


# set on ObservabilityConfig if the user left --cudagraph-metrics out: vLLM must then print no table
_UNASKED = "npu_gptoss_counts_steps"


def count_steps(vllm_config: Any) -> None:
    """Makes the engines report their steps, as --cudagraph-metrics does."""
    observed = vllm_config.observability_config
    if not observed.cudagraph_metrics:
        observed.cudagraph_metrics = True
        setattr(observed, _UNASKED, True)


def counts_steps(vllm_config: Any) -> bool:
    """True if this server's engines report their steps.

    Call it after the engines have read the configuration and before vLLM's own logger does: without --cudagraph-metrics
    that logger must print no table.
    """
    observed = vllm_config.observability_config
    counted = observed.cudagraph_metrics
    if getattr(observed, _UNASKED, False):
        observed.cudagraph_metrics = False
    return counted or getattr(observed, _UNASKED, False)


def step_of(scheduler_stats: Any) -> Step | None:
    """Returns the step's record from SchedulerStats and removes the kernels from it."""
    told = getattr(scheduler_stats, "cudagraph_stats", None)
    if told is None:
        return None
    name, kernels = without_kernels(told.runtime_mode)
    scheduler_stats.cudagraph_stats = dataclasses.replace(told, runtime_mode=name)
    mode = name.rpartition(".")[2].lower()
    if mode not in MODES:  # NONE
        return Step(EAGER, 0, told.num_unpadded_tokens, told.num_paddings, kernels)
    return Step(mode, told.num_padded_tokens, told.num_unpadded_tokens, told.num_paddings, kernels)


def decode_rows(runner: Any) -> int:
    """Returns the rows of a request in a decode step."""
    return runner.decode_query_len


def captured(runner: Any) -> dict[str, list[int]]:
    """Returns the sizes of the captured graphs, by mode."""
    manager = getattr(runner, "cudagraph_manager", None)  # of the second runner; the first does not run our model
    found = manager._capture_descs if manager is not None and manager._graphs_captured else {}
    return {mode.name: sorted({each.num_tokens for each in sizes}) for mode, sizes in found.items() if sizes}


@contextlib.contextmanager
def watching(runner: Any, watch: Watch) -> Iterator[None]:
    """Lets the canary choose steps without a graph, and see how each step runs."""
    manager, right = runner.cudagraph_manager, runner.cudagraph_manager.dispatch

    def dispatch(*given: Any, **options: Any) -> Any:
        manager._graphs_captured = not watch.eager  # as before the capture
        try:
            found = right(*given, **options)
        finally:
            manager._graphs_captured = True
        watch.mode, watch.size = found.cg_mode.name, found.num_tokens
        return found

    with mock.patch.object(manager, "dispatch", dispatch):
        yield


def empty_step() -> Any:
    from vllm.v1.core.sched.output import SchedulerOutput

    return SchedulerOutput.make_empty()


def last_rows(worker: Any, watch: Watch) -> tuple[list[str], torch.Tensor | None]:
    """Returns the requests of the step that has just run, and their last rows; then ends the step as vLLM does.

    The engine sends a step when it has the result of the last but one: the GPU reads a step's lengths and tokens from
    buffers of the host, of which there are two. With more steps on their way the GPU read those of a later step.
    """
    state = worker.model_runner.execute_model_state
    batch = state.input_batch
    rows = None if state.hidden_states is None else state.hidden_states[batch.logits_indices]
    before, watch.behind = watch.behind, worker.sample_tokens(None)
    if hasattr(before, "get_output"):
        before.get_output()
    return list(batch.req_ids), rows


def leave_full_graphs(worker: Any) -> None:
    """Drops the graphs of whole steps: decode steps replay the pieces, or run without a graph where there are none."""
    from vllm.config import CUDAGraphMode

    manager = worker.model_runner.cudagraph_manager
    manager._capture_descs.pop(CUDAGraphMode.FULL, None)
    for graphs in manager._candidates.values():
        graphs[:] = [each for each in graphs if each.cg_mode != CUDAGraphMode.FULL]
    manager.graphs = {each: graph for each, graph in manager.graphs.items() if each.cg_mode != CUDAGraphMode.FULL}
