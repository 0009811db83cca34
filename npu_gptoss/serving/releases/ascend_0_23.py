"""Names and signatures of vllm-ascend 0.23.0 that differ between releases."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.releases.ascend_0_11 import STAYED, STAYED_SEAMS

if TYPE_CHECKING:
    import torch

# Names that serving imports from vllm-ascend, by module.
MODULES = STAYED | {"vllm_ascend.ops.fused_moe.token_dispatcher": "TokenDispatcherWithAllGather"}
_EXPERTS = "vllm_ascend.ops.fused_moe"
SEAMS = STAYED_SEAMS | {
    f"{_EXPERTS}.token_dispatcher:TokenDispatcherWithAllGather.token_dispatch": "token_dispatch_input",
    f"{_EXPERTS}.token_dispatcher:TokenDispatcherWithAllGather.token_combine": "hidden_states combine_metadata",
    f"{_EXPERTS}.moe_runtime_args:build_fused_experts_input": (
        "hidden_states topk_weights topk_ids w1 w2 quant_type dynamic_eplb expert_map mc2_mask"
    ),
    f"{_EXPERTS}.moe_runtime_args:build_token_dispatch_input": "fused_experts_input",
    f"{_EXPERTS}.moe_comm_method:FusedExpertsResult": "routed_out",
    "vllm_ascend.quantization.quant_type:QuantType.NONE": "",
    "vllm_ascend.ascend_forward_context:_EXTRA_CTX": "",
    "vllm_ascend.ascend_config:get_ascend_config": "",
}
# REPLAYS_IN_ORDER
SOURCES = {"vllm_ascend.compilation.acl_graph:ACLGraphWrapper.__call__": "torch.npu.current_stream().synchronize()"}

# Arguments that vllm-ascend's experts layer passes to `apply` beyond vLLM's, with the value for "not used".
UNUSED_EXPERTS_OPTIONS: dict[str, Any] = {"log2phy": None, "global_redundant_expert_num": 0, "pertoken_scale": None}
GRAPHS = "PIECEWISE"  # the default here; vLLM's is whole decode steps, which no card has confirmed
WORKSPACE = None  # CANN 9.1 reports the need of a captured call
REPLAYS_IN_ORDER = True  # it waits for the stream before each replay
# Triton kernels (module, name) that every step needs
LAUNCHED = (("vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"),)
# vLLM's own operator calls the layer's implementation, once
splitting_attention = None


def updates_lengths() -> bool:
    """True if captured attention calls get each step's lengths, which the patch ascend-full-graph provides."""
    from vllm_ascend.worker.model_runner_v1 import update_full_graph_params

    return hasattr(update_full_graph_params, "__npu_gptoss_replaces__")


def layout_objection(parallel: Any) -> str | None:
    """Returns the reason why this layout cannot capture whole decode steps; None if it can."""
    return None


def guard(runner: Any, fits: Callable[[tuple[int, ...]], bool]) -> None:
    """Keeps steps whose lengths do not fit one call out of full graphs.

    The runner chooses the graph before it builds the metadata, but after its own list of lengths.
    """
    right = runner._determine_batch_execution_and_padding

    def determine(**asked: Any) -> Any:
        real = asked.get("force_uniform_decode") is None  # a dummy run forces its mode; its lengths are stale
        if real and not fits(tuple(runner.optimistic_seq_lens_cpu[: asked["num_reqs"]].tolist())):
            asked["use_cascade_attn"] = True  # vLLM uses no full graph for cascade attention
        return right(**asked)

    runner._determine_batch_execution_and_padding = determine


def comm_method() -> Any:
    """Returns the step's way of sending tokens to their experts."""
    from vllm_ascend.ascend_forward_context import _EXTRA_CTX

    return _EXTRA_CTX.moe_comm_method


def dispatch(
    method: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    mc2_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the rows by expert, the groups and their kind, and a function that sends the rows back."""
    from vllm_ascend.ops.fused_moe.moe_runtime_args import build_fused_experts_input, build_token_dispatch_input
    from vllm_ascend.quantization.quant_type import QuantType

    asked = build_fused_experts_input(
        hidden_states=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w1=None,  # our method computes the experts
        w2=None,
        quant_type=QuantType.NONE,
        dynamic_eplb=False,
        expert_map=expert_map,
        mc2_mask=mc2_mask,
    )
    dispatcher = method.token_dispatcher
    given = dispatcher.token_dispatch(token_dispatch_input=build_token_dispatch_input(fused_experts_input=asked))

    def combine(rows: torch.Tensor) -> torch.Tensor:
        return dispatcher.token_combine(hidden_states=rows, combine_metadata=given.combine_metadata)

    return given.hidden_states, given.group_list, given.group_list_type, combine


def experts_result(hidden_states: torch.Tensor) -> Any:
    """Converts to the type that the layer expects from `apply`."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult

    return FusedExpertsResult(routed_out=hidden_states)


def capture_piecewise(config: Any) -> None:
    """Repeats vllm-ascend's settings for PIECEWISE after it has prepared full graphs."""
    from vllm.config import CUDAGraphMode
    from vllm_ascend.ascend_config import get_ascend_config

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    compilation.splitting_ops = None  # full graphs set none; None restores vLLM's split at attention
    compilation.set_splitting_ops_for_v1(
        all2all_backend=config.parallel_config.all2all_backend,
        data_parallel_size=config.parallel_config.data_parallel_size,
    )
    own = get_ascend_config().ascend_compilation_config
    own.enable_npugraph_ex = own.enable_static_kernel = False
