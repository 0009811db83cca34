"""Names and signatures of vllm-ascend 0.23.0 that differ between releases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

from npu_gptoss.serving.releases.ascend_0_11 import (  # noqa: F401
    STAYED,
    STAYED_SEAMS,
    decode_rows,
    forget_calls,
    written,
)
from npu_gptoss.serving.releases.vllm_0_33 import empty_step  # noqa: F401

if TYPE_CHECKING:
    import torch

    from npu_gptoss.serving.canary import Watch

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

WORKSPACE = None  # CANN 9.1 reports the need of a captured call
REPLAYS_IN_ORDER = True  # it waits for the stream before whole steps and in plain PIECEWISE (its PR 14081),
WITHOUT_ORDER = ("FULL_AND_PIECEWISE",)  # but not before the pieces of this mode's mixed steps
# Triton kernels (module, name) that every step needs
LAUNCHED = (("vllm.v1.worker.block_table", "_compute_slot_mapping_kernel"),)
# vLLM's own operator calls the layer's implementation, once
splitting_attention = None


def default_graphs(config: Any) -> str | None:
    """Returns the mode of graphs where the user chose none; None leaves it to vLLM.

    Whole decode steps, which have run on hardware with vllm-ascend's attention calls; ours have not: see
    `serving.canary`. With drafts that are scheduled as they come requests differ in rows, and only pieces replay such
    a step. These are in order then, for vLLM waits for each step's tokens before the next.
    """
    from vllm.config import CompilationMode
    from vllm.config.vllm import OptimizationLevel

    if config.optimization_level < OptimizationLevel.O2:  # of which each names a mode
        return None
    ragged = config.speculative_config is not None and not runs_ahead(config)
    pieces = config.compilation_config.mode in (None, CompilationMode.VLLM_COMPILE)  # else vLLM would leave graphs out
    return "FULL_AND_PIECEWISE" if ragged and pieces else "FULL_DECODE_ONLY"


def runs_ahead(config: Any) -> bool:
    """True if vLLM will schedule a step before the last one has ended; where it is left to vLLM, it decides later than
    we do (VllmConfig.__post_init__)."""
    from typing import get_args

    from vllm.config.speculative import EagleModelTypes, NgramGPUTypes
    from vllm.v1.executor import Executor

    asked, drafter = config.scheduler_config.async_scheduling, config.speculative_config
    if asked is not None:
        return asked
    if drafter is not None:
        if drafter.method not in (*get_args(EagleModelTypes), *get_args(NgramGPUTypes)):
            return False
        if drafter.disable_padded_drafter_batch:
            return False
    return Executor.get_class(config).supports_async_scheduling()


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
        kept = given.combine_metadata
        rows = dispatcher.token_combine(hidden_states=rows, combine_metadata=kept)
        return written(rows, getattr(kept, "mc2_mask", None))  # of MC2 only

    return given.hidden_states, given.group_list, given.group_list_type, combine


def experts_result(hidden_states: torch.Tensor) -> Any:
    """Converts to the type that the layer expects from `apply`."""
    from vllm_ascend.ops.fused_moe.moe_comm_method import FusedExpertsResult

    return FusedExpertsResult(routed_out=hidden_states)


def mc2_rows(config: Any) -> int:
    """Returns how many rows a rank sends to experts at once by MC2, at most (vllm-ascend's set_mc2_tokens_capacity)."""
    most = config.compilation_config.max_cudagraph_capture_size or config.scheduler_config.max_num_seqs
    if (config.additional_config or {}).get("enable_prefill_mc2"):
        most = config.scheduler_config.max_num_batched_tokens
    return min(-(-most // config.parallel_config.tensor_parallel_size), 512)


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


def captured(runner: Any) -> dict[str, list[int]]:
    """Returns the sizes of the captured graphs, by mode."""
    found = runner.cudagraph_dispatcher.get_capture_descs() if runner.use_aclgraph else ()
    return {mode.name: sorted({each.num_tokens for each in sizes}) for mode, sizes in found if sizes}


@contextlib.contextmanager
def watching(runner: Any, watch: Watch) -> Iterator[None]:
    """Lets the canary choose steps without a graph, and see how each step runs."""
    right = runner._determine_batch_execution_and_padding

    def determine(**asked: Any) -> Any:
        found = right(**{**asked, "force_eager": watch.eager or asked["force_eager"]})
        watch.mode, watch.size = found[0].name, found[1].num_tokens
        return found

    with mock.patch.object(runner, "_determine_batch_execution_and_padding", determine):
        yield


def last_rows(worker: Any, watch: Watch) -> tuple[list[str], torch.Tensor | None]:
    """Returns the requests of the step that has just run, and their last rows; samples nothing.

    Without asynchronous scheduling vLLM waits for a step's tokens before it fills its buffers for the next one.
    """
    import torch

    runner = worker.model_runner
    if runner.prepare_inputs_event is None:
        torch.accelerator.synchronize()
    state, runner.execute_model_state = runner.execute_model_state, None
    return list(runner.input_batch.req_ids), state and state.sample_hidden_states


def leave_full_graphs(worker: Any) -> None:
    """Compiles the model again, split at attention, and captures the pieces in the place of whole steps."""
    import torch
    from vllm.compilation.wrapper import reset_compile_wrapper
    from vllm.config import CUDAGraphMode, set_current_vllm_config

    runner, config = worker.model_runner, worker.vllm_config
    capture_piecewise(config)
    runner.model = runner.get_model()  # without the wrapper that holds the graphs
    forget_calls()
    torch.compiler.reset()
    with set_current_vllm_config(config):
        reset_compile_wrapper(runner.model)
    dispatcher = runner.cudagraph_dispatcher = type(runner.cudagraph_dispatcher)(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE, runner.uniform_decode_query_len)
    runner._dummy_run(max(config.compilation_config.cudagraph_capture_sizes), cudagraph_runtime_mode=CUDAGraphMode.NONE)
    runner.capture_model()
