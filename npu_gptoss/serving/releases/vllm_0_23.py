"""Names and signatures of vLLM 0.23.0, under vllm-ascend 0.23.0, that differ between releases.

Its server has the structure and request classes of 0.33; it parses a harmony turn as 0.11.0 does.
"""

from __future__ import annotations

from bisect import bisect_left
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.releases import vllm_0_11

# equal in both releases
from npu_gptoss.serving.releases.vllm_0_11 import (  # noqa: F401
    MXFP4_NAME,
    QUANTIZATIONS,
    STAYED,
    register_formats,
    yarn,
)
from npu_gptoss.serving.releases.vllm_0_33 import (  # noqa: F401
    as_written,
    count_steps,
    counts_steps,
    load_tokenizer,
    profiler_options,
    registered_model,
    step_of,
    structure_key,
    validate_structure,
)

if TYPE_CHECKING:
    import torch

    from npu_gptoss.model.config import GptOssConfig

# Names that serving imports from vLLM, by module.
MODULES = STAYED | {
    "vllm.entrypoints.openai.chat_completion.protocol": "ChatCompletionRequest ChatCompletionResponse",
    "vllm.entrypoints.openai.engine.protocol": "ErrorInfo ErrorResponse RequestResponseMetadata UsageInfo",
    "vllm.entrypoints.openai.responses.protocol": "ResponsesResponse",
    "vllm.entrypoints.serve.utils.api_utils": (
        "get_max_tokens load_aware_call validate_json_request with_cancellation"
    ),
    "vllm.entrypoints.serve.utils.server_utils": "AuthenticationMiddleware",
    "vllm.model_executor.layers.attention": "Attention",
    "vllm.model_executor.layers.fused_moe.expert_map_manager": "determine_expert_map",
    "vllm.model_executor.layers.fused_moe.fused_moe_method_base": "FusedMoEMethodBase",
    "vllm.utils.system_utils": "kill_process_tree",
    "vllm.v1.attention.backend": (
        "AttentionBackend AttentionImpl AttentionLayer AttentionMetadataBuilder AttentionType CommonAttentionMetadata"
    ),
}


VALIDATION_ARGUMENTS = ("self", "structured_outputs_config", "tokenizer")
DRAFTERS = ("ngram", "eagle3")  # methods of --speculative-config
MXFP4_NAMES = ("mxfp4", "gpt_oss_mxfp4")  # in vLLM's copy of config.json


def take_out(processor: Any, state: Any) -> None:
    """Removes the RequestState of an ended request from an OutputProcessor."""
    processor._finish_request(state)
    processor.lora_states.request_finished(state.request_id, state.lora_name)


def abort_requests(processor: Any, request_ids: list[str]) -> list[str]:
    """Removes requests, and samples of a request, by the engine's ids. Returns the removed ids."""
    return processor.abort_requests(request_ids, internal=True)


def unavailable(said: str) -> Exception:
    """Returns the exception that makes a route answer with status 503."""
    from vllm.entrypoints.openai.engine.protocol import GenerationError

    error = GenerationError(said)
    error.status_code = HTTPStatus.SERVICE_UNAVAILABLE
    return error


# Arguments for vLLM's experts layer beyond those of every release.
EXPERTS_LAYER_OPTIONS: dict[str, Any] = {}


def choose_sizes(config: Any, sizes: list[int]) -> None:
    """Sets the numbers of tokens that graphs are captured for, unless the user did."""
    compilation = config.compilation_config
    if compilation.cudagraph_capture_sizes is None and compilation.max_cudagraph_capture_size is None:
        compilation.cudagraph_capture_sizes = sizes


def largest_chosen(config: Any) -> int | None:
    """Returns the largest size of a graph that the user asked for; None if they left it to us."""
    compilation = config.compilation_config
    return max(compilation.cudagraph_capture_sizes or [compilation.max_cudagraph_capture_size or 0]) or None


def sequence_parallelism(config: Any) -> bool:
    return bool(config.compilation_config.pass_config.enable_sp)


def host_lengths(common: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns `query_start_loc` and `seq_lens` of a step's real requests as host integers.

    Reads the runner's private list: the public `seq_lens_cpu` copies from the device if it is not set.
    """
    if common._seq_lens_cpu is None:
        raise RuntimeError("vLLM has no lengths of this step on the host; leave out --async-scheduling with drafts")
    starts = common.query_start_loc_cpu[: common.num_reqs + 1].tolist()
    real = bisect_left(starts, common.num_actual_tokens)  # padding rows of a full graph count as requests
    return tuple(starts[: real + 1]), tuple(common._seq_lens_cpu[:real].tolist())


def expert_share(config: Any) -> tuple[int, tuple[int, int]]:
    """Returns vLLM's split of the experts, as in 0.11.0, and among context- and sequence-parallel ranks."""
    parallel = config.parallel_config
    sequence = parallel.tensor_parallel_size if parallel.use_sequence_parallel_moe else 1
    return vllm_0_11.expert_share(config, pcp_size_=1, sp_size_=sequence)


def yarn_rotary(config: GptOssConfig, dtype: torch.dtype) -> Any:
    """Returns vLLM's rotary object for this model on the current default device; vLLM shares it between layers."""
    from vllm.model_executor.layers.rotary_embedding import get_rope

    return get_rope(
        config.head_dim,
        config.max_position_embeddings,
        is_neox_style=True,
        rope_parameters={"rope_theta": config.rope_theta} | yarn(config),
        dtype=dtype,
    )
