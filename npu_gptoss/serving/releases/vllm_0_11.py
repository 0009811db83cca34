"""Names and signatures of vLLM 0.11.0 that differ between releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.releases.steps_0_11 import take
from npu_gptoss.serving.steps import Step

if TYPE_CHECKING:
    import torch

    from npu_gptoss.model.config import GptOssConfig

_LAYERS = "vllm.model_executor.layers"
_MODELS = "vllm.model_executor.models"

# Names that serving imports from vLLM, by module. vLLM 0.23.0 has these in the same place.
STAYED: dict[str, str] = {
    "vllm": "ModelRegistry SamplingParams",
    "vllm.compilation.decorators": "support_torch_compile",
    "vllm.config": "CUDAGraphMode CacheConfig VllmConfig",
    "vllm.distributed": (
        "get_dp_group get_pp_group get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_tp_group "
        "get_world_group tensor_model_parallel_all_gather"
    ),
    "vllm.distributed.utils": "get_pp_indices",
    "vllm.forward_context": "ForwardContext get_forward_context",
    f"{_LAYERS}.fused_moe": "FusedMoE",
    f"{_LAYERS}.fused_moe.config": "FUSED_MOE_UNQUANTIZED_CONFIG FusedMoEQuantConfig",
    f"{_LAYERS}.layernorm": "RMSNorm",
    f"{_LAYERS}.linear": "QKVParallelLinear RowParallelLinear",
    f"{_LAYERS}.logits_processor": "LogitsProcessor",
    f"{_LAYERS}.quantization": "QUANTIZATION_METHODS register_quantization_config",
    f"{_LAYERS}.quantization.base_config": "QuantizationConfig",
    f"{_LAYERS}.rotary_embedding.base": "RotaryEmbedding",
    f"{_LAYERS}.vocab_parallel_embedding": "ParallelLMHead VocabParallelEmbedding",
    f"{_MODELS}.config": "MODELS_CONFIG_MAP",
    f"{_MODELS}.interfaces": "SupportsEagle3 SupportsPP",
    f"{_MODELS}.utils": (
        "PPMissingLayer extract_layer_index make_empty_intermediate_tensors_factory make_layers "
        "maybe_prefix sequence_parallel_chunk"
    ),
    "vllm.platforms": "current_platform",
    "vllm.plugins": "load_general_plugins",
    "vllm.sampling_params": "StructuredOutputsParams",
    "vllm.sequence": "IntermediateTensors",
    "vllm.triton_utils": "HAS_TRITON",
    "vllm.v1.core.sched.output": "NewRequestData",
    "vllm.v1.kv_cache_interface": "AttentionSpec FullAttentionSpec",
    "vllm.v1.metrics.loggers": "StatLoggerBase",
}
MODULES = STAYED | {
    "vllm.attention": "Attention",
    "vllm.attention.backends.abstract": "AttentionBackend AttentionImpl AttentionLayer AttentionType",
    "vllm.entrypoints.openai.api_server": "AuthenticationMiddleware validate_json_request",
    "vllm.entrypoints.openai.protocol": (
        "ChatCompletionRequest ChatCompletionResponse ErrorInfo ErrorResponse RequestResponseMetadata "
        "ResponsesResponse UsageInfo"
    ),
    "vllm.entrypoints.utils": "get_max_tokens load_aware_call with_cancellation",
    f"{_LAYERS}.fused_moe.layer": "FusedMoEMethodBase determine_expert_map",
    "vllm.utils": "kill_process_tree",
    "vllm.v1.attention.backends.utils": "AttentionMetadataBuilder CommonAttentionMetadata",
}

MXFP4_NAME = "gptoss_mxfp4"  # ours, see serving/quantization.py
MXFP4_NAMES = ("mxfp4",)  # in vLLM's copy of config.json
# Values that `--quantization` may have after vLLM has read the checkpoint.
QUANTIZATIONS = (None, MXFP4_NAME)
DRAFTERS: tuple[str, ...] = ()  # methods of --speculative-config


def as_written(config: dict[str, Any]) -> dict[str, Any]:
    """Returns vLLM's copy of config.json; this release does not change it."""
    return config


def registered_model(module: str, name: str) -> Any:
    """Returns the entry of vLLM's registry for this class, inspected in the starting process.

    vLLM inspects in another process, which takes 10 s, because a model's import may start CUDA before the engine is
    forked; the import of ours starts no device. 0.23 keeps what it found in a file.
    """
    from vllm.model_executor.models import registry

    class Registered(registry._LazyRegisteredModel):
        def inspect_model_cls(self) -> Any:
            return registry._ModelInfo.from_model_cls(self.load_model_cls())

    return Registered(module, name)


def register_formats() -> None:
    """Registers our name for MXFP4 before vLLM reads a checkpoint."""
    from npu_gptoss.serving import quantization

    quantization.register()


# Arguments for vLLM's experts layer beyond those of every release.
EXPERTS_LAYER_OPTIONS: dict[str, Any] = {"reduce_results": True}


def choose_sizes(config: Any, sizes: list[int]) -> None:
    """Sets the numbers of tokens that graphs are captured for, unless the user did."""
    scheduler = config.scheduler_config
    # vLLM's value when --cuda-graph-sizes is left out
    default = [min(scheduler.max_num_seqs * 2, 512)]
    if config.compilation_config.cudagraph_capture_sizes is None and scheduler.cuda_graph_sizes == default:
        scheduler.cuda_graph_sizes = sizes


def largest_chosen(config: Any) -> int | None:
    """Returns the largest size of a graph that was asked for: the user's, or that of `choose_sizes`."""
    return max(config.compilation_config.cudagraph_capture_sizes or config.scheduler_config.cuda_graph_sizes)


def sequence_parallelism(config: Any) -> bool:
    return config.compilation_config.pass_config.enable_sequence_parallelism


def host_lengths(common: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `query_start_loc` and `seq_lens` of a step's real requests as host integers."""
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    return tuple(starts), tuple(common.seq_lens_cpu[: common.num_reqs].tolist())


def yarn(config: GptOssConfig) -> dict[str, Any]:
    return {"rope_type": "yarn"} | {
        name: getattr(config.rope_scaling, name)
        for name in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
    }


def yarn_rotary(config: GptOssConfig, dtype: torch.dtype) -> Any:
    """Returns vLLM's rotary object for this model on the current default device; vLLM shares it between layers."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    positions, size = config.max_position_embeddings, config.head_dim
    return get_rope(size, size, positions, config.rope_theta, True, rope_scaling=yarn(config), dtype=dtype)


def expert_share(config: Any, **sizes: int) -> tuple[int, tuple[int, int]]:
    """Returns vLLM's split of the experts: parts by width, and this rank's experts [first, end). sizes: of the groups
    that only a later release asks for."""
    from vllm.distributed import get_dp_group, get_tensor_model_parallel_world_size
    from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig

    from npu_gptoss.serving.releases.vllm import determine_expert_map

    cut = FusedMoEParallelConfig.make(
        tp_size_=get_tensor_model_parallel_world_size(),
        dp_size_=get_dp_group().world_size,
        vllm_parallel_config=config.parallel_config,
        **sizes,
    )
    # the map: local ids by global id, -1 elsewhere
    count, expert_map, *_ = determine_expert_map(
        cut.ep_size, cut.ep_rank, config.model_config.hf_config.num_local_experts
    )
    first = 0 if expert_map is None else int((expert_map >= 0).int().argmax())
    return cut.tp_size, (first, first + count)


def take_out(processor: Any, state: Any) -> None:
    """Removes the RequestState of an ended request from an OutputProcessor."""
    processor.request_states.pop(state.request_id)
    processor.lora_states.abort_request(state)


def abort_requests(processor: Any, request_ids: list[str]) -> list[str]:
    """Removes requests, and samples of a request, by the engine's ids. Returns the removed ids."""
    return processor.abort_requests(request_ids)


def load_tokenizer(model_config: Any) -> Any:
    from vllm.transformers_utils.tokenizer import init_tokenizer_from_configs

    return init_tokenizer_from_configs(model_config=model_config)


VALIDATION_ARGUMENTS = ("self", "params")


def validate_structure(params: Any, vllm_config: Any, tokenizer: Any) -> None:
    """Runs vLLM's validation of SamplingParams with a structure, which chooses the backend. Raises vLLM's errors."""
    from types import SimpleNamespace

    from vllm.v1.engine.processor import Processor

    from npu_gptoss.serving.compat.patch import stock

    reader = SimpleNamespace(
        structured_outputs_config=vllm_config.structured_outputs_config, model_config=vllm_config.model_config
    )
    stock(Processor._validate_structured_output)(reader, params)


def structure_key(params: Any) -> tuple[Any, str]:
    """Returns the first two arguments of a backend's `compile_grammar`."""
    from vllm.v1.structured_output.request import get_structured_output_key

    return get_structured_output_key(params)


def profiler_options(folder: str) -> dict[str, Any]:
    """Returns no options of `LLM`: a variable names the trace folder (VLLM_TORCH_PROFILER_DIR)."""
    return {}


def count_steps(vllm_config: Any) -> None:
    """Does nothing: `compat/server/metrics.py` makes the engines report their steps."""


def counts_steps(vllm_config: Any) -> bool:
    """True if this server's engines report their steps."""
    return True


def step_of(scheduler_stats: Any) -> Step | None:
    """Takes the step's record out of SchedulerStats."""
    return take(scheduler_stats)
