"""vllm-ascend 0.11.0: where its names are, and the shapes that other releases have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.lines import resolve

if TYPE_CHECKING:
    import torch

# The names that serving takes from vllm-ascend, by module; here those that 0.23.0 has in the same place.
STAYED: dict[str, tuple[str, ...]] = {
    "vllm_ascend.attention.attention_v1": (
        "AscendAttentionBackend",
        "AscendAttentionBackendImpl",
        "AscendAttentionMetadataBuilder",
        "AscendAttentionState",
    ),
    "vllm_ascend.attention.utils": ("AscendCommonAttentionMetadata",),
    "vllm_ascend.compilation.acl_graph": ("get_graph_params",),
    "vllm_ascend.utils": ("weak_ref_tensors",),
}
MODULES = STAYED | {"vllm_ascend.ops.moe.token_dispatcher": ("TokenDispatcherWithAllGather",)}


def __getattr__(name: str) -> Any:
    return resolve(MODULES, name)


# What vllm-ascend's experts layer passes to `apply` beyond vLLM's, with the value that means that it is not used.
UNUSED_EXPERTS_OPTIONS: dict[str, Any] = {
    "quantized_x_for_share": None,
    "dynamic_scale_for_share": None,
    "shared_experts": None,
    "log2phy": None,
    "global_redundant_expert_num": 0,
}


GRAPHS = None  # vllm-ascend's own choice is PIECEWISE
# Bytes of scratch memory for a captured call, whose need CANN 8.3 as published refuses to tell for packed tokens (R37).
# The call takes any pointer and size. What it needs follows from its tiling, on at most 24 cores: 100 MiB on 8.3
# (prompt_flash_attention_tiling.cpp; 24 * 4 * (3 * 512 * 512 + 4 * 512 * 64) bytes and 16 MiB), 107.5 MiB from 8.5 on,
# with the keys of a request split over cores (fia_tiling_nonquant.cpp, CalcMaxWorkspaceSize of v8.5.0 to branch 9.1.0;
# 24 * 3 997 696 bytes and 16 MiB). The probe says whether it is enough.
WORKSPACE = 128 << 20
# It starts the next graph before the last one has ended (mended in its #4233, #5966): wrong text or, with full graphs,
# a hang. What waits by chance, the copy of each step's tokens, is what asynchronous scheduling leaves out.
REPLAYS_IN_ORDER = False
LAUNCHED: tuple[tuple[str, str], ...] = ()


def updates_lengths() -> bool:
    """Whether captured attention calls get each step's lengths: the patch ascend-full-graph has the runner do it."""
    from vllm_ascend.worker.model_runner_v1 import update_attn_params

    return hasattr(update_attn_params, "__npu_gptoss_replaces__")


def layout_objection(parallel: Any) -> str | None:
    """Why decode steps cannot be captured as a whole in this layout; None when they can."""
    if parallel.pipeline_parallel_size > 1:
        return "vllm-ascend 0.11.0 captures no stage of a pipeline as a whole"
    if parallel.data_parallel_size > 1:
        # a rank without requests replays its decode graph while another computes a prompt of a captured size: the
        # graph gathers, the other multicasts, and each takes the other's data for its own
        return "vllm-ascend 0.11.0 lets one rank of data parallelism replay decodes while another computes a prompt"
    return None


def guard(runner: Any, fits: Callable[[tuple[int, ...]], bool]) -> None:
    """Lets steps run without a graph whose lengths do not fit one call. The graph is chosen behind the metadata."""
    from vllm.config import CUDAGraphMode

    dispatcher = runner.aclgraph_dispatcher
    right = dispatcher.dispatch

    def dispatch(*args: Any, **kwargs: Any) -> tuple[CUDAGraphMode, Any]:
        mode, descriptor = right(*args, **kwargs)
        builders = (group.get_metadata_builder() for groups in runner.attn_groups for group in groups)
        if mode == CUDAGraphMode.FULL and not all(fits(builder.built) for builder in builders):
            return CUDAGraphMode.NONE, None
        return mode, descriptor

    dispatcher.dispatch = dispatch


def splitting_attention(query: Any, key: Any, value: Any, output: Any, layer_name: str) -> None:
    """The operator at which compiled graphs are split; it calls the layer's implementation again, from inside."""
    import torch

    torch.ops.vllm.unified_ascend_attention_with_output(query, key, value, output, layer_name)


def comm_method() -> Any:
    """How tokens travel to their experts in this step."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().moe_comm_method


def dispatch(
    method: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    mc2_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Rows by expert, the groups and their kind, and what takes the rows back."""
    given = method.token_dispatcher.token_dispatch(
        hidden_states=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        expert_map=expert_map,
        mc2_mask=method.mc2_mask,
    )

    def combine(rows: torch.Tensor) -> torch.Tensor:
        return method.token_dispatcher.token_combine(hidden_states=rows)

    return given["hidden_states"], given["group_list"], given["group_list_type"], combine


def experts_result(hidden_states: torch.Tensor) -> torch.Tensor:
    """As the layer takes what `apply` returns."""
    return hidden_states


def capture_piecewise(config: Any) -> None:
    """What vllm-ascend's platform does for PIECEWISE, in its order."""
    from vllm.config import CUDAGraphMode
    from vllm_ascend.utils import update_aclgraph_sizes

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    missing = {"vllm.unified_ascend_attention_with_output", "vllm.mla_forward"} - set(compilation.splitting_ops)
    compilation.splitting_ops.extend(sorted(missing))
    update_aclgraph_sizes(config)
