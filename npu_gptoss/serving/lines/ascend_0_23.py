"""vllm-ascend 0.23.0: where its names are, and the shapes that other releases have changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.lines import resolve
from npu_gptoss.serving.lines.ascend_0_11 import STAYED

if TYPE_CHECKING:
    import torch

# The names that serving takes from vllm-ascend, by module.
MODULES = STAYED | {"vllm_ascend.ops.fused_moe.token_dispatcher": ("TokenDispatcherWithAllGather",)}


def __getattr__(name: str) -> Any:
    return resolve(MODULES, name)


# What vllm-ascend's experts layer passes to `apply` beyond vLLM's, with the value that means that it is not used.
UNUSED_EXPERTS_OPTIONS: dict[str, Any] = {"log2phy": None, "global_redundant_expert_num": 0, "pertoken_scale": None}
GRAPHS = "PIECEWISE"  # unless the user says: vLLM would choose whole decode steps, which no card has confirmed
WORKSPACE = None  # CANN 9.1 tells what a captured call needs
REPLAYS_IN_ORDER = True  # it waits for the stream before each replay
# Triton kernels of every step (module, name) beside which there is no other way
LAUNCHED = (("vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"),)
# vLLM's own operator calls the layer's implementation, once
splitting_attention = None


def updates_lengths() -> bool:
    """Whether captured attention calls get each step's lengths: the patch ascend-full-graph has the runner do it."""
    from vllm_ascend.worker.model_runner_v1 import update_full_graph_params

    return hasattr(update_full_graph_params, "__npu_gptoss_replaces__")


def layout_objection(parallel: Any) -> str | None:
    """Why decode steps cannot be captured as a whole in this layout; None when they can."""
    return None


def guard(runner: Any, fits: Callable[[tuple[int, ...]], bool]) -> None:
    """Keeps steps out of full graphs whose lengths do not fit one call. The graph is chosen before the metadata is
    built, but behind the runner's own list of lengths."""
    right = runner._determine_batch_execution_and_padding

    def determine(**asked: Any) -> Any:
        real = asked.get("force_uniform_decode") is None  # a dummy run says what it wants, and its lengths are stale
        if real and not fits(tuple(runner.optimistic_seq_lens_cpu[: asked["num_reqs"]].tolist())):
            asked["use_cascade_attn"] = True  # vLLM's word for attention that no full graph takes
        return right(**asked)

    runner._determine_batch_execution_and_padding = determine


def comm_method() -> Any:
    """How tokens travel to their experts in this step."""
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
    """Rows by expert, the groups and their kind, and what takes the rows back."""
    from vllm_ascend.ops.fused_moe.moe_runtime_args import build_fused_experts_input, build_token_dispatch_input
    from vllm_ascend.quantization.quant_type import QuantType

    asked = build_fused_experts_input(
        hidden_states=x,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        w1=None,  # the experts are ours
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
    """As the layer takes what `apply` returns."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult

    return FusedExpertsResult(routed_out=hidden_states)


def capture_piecewise(config: Any) -> None:
    """What vllm-ascend's platform does for PIECEWISE, where it has prepared full graphs already."""
    from vllm.config import CUDAGraphMode
    from vllm_ascend.ascend_config import get_ascend_config

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    compilation.splitting_ops = None  # none for full graphs; now vLLM's own for attention
    compilation.set_splitting_ops_for_v1(
        all2all_backend=config.parallel_config.all2all_backend,
        data_parallel_size=config.parallel_config.data_parallel_size,
    )
    own = get_ascend_config().ascend_compilation_config
    own.enable_npugraph_ex = own.enable_static_kernel = False
