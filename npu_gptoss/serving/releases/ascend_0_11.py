"""Names and signatures of vllm-ascend 0.11.0 that differ between releases."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    import torch

    from npu_gptoss.serving.canary import Watch

# Names that serving imports from vllm-ascend, by module. 0.23.0 has these in the same place.
STAYED: dict[str, str] = {
    "vllm_ascend.attention.attention_v1": (
        "AscendAttentionBackend AscendAttentionBackendImpl AscendAttentionMetadataBuilder AscendAttentionState"
    ),
    "vllm_ascend.attention.utils": "AscendCommonAttentionMetadata",
    "vllm_ascend.compilation.acl_graph": "get_graph_params",
    "vllm_ascend.utils": "weak_ref_tensors",
}
MODULES = STAYED | {"vllm_ascend.ops.moe.token_dispatcher": "TokenDispatcherWithAllGather"}
# What else is used of it (`seams`): "module:name" with the parameters that calls give it, and code that is relied on
_ATTENTION, _GRAPHS = "vllm_ascend.attention.attention_v1", "vllm_ascend.compilation.acl_graph"
_DISPATCHER = "vllm_ascend.ops.moe.token_dispatcher:TokenDispatcherWithAllGather"
STAYED_SEAMS = {
    f"{_ATTENTION}:AscendAttentionBackend.get_impl_cls": "",
    f"{_ATTENTION}:AscendAttentionBackend.get_builder_cls": "",
    f"{_ATTENTION}:AscendAttentionMetadataBuilder": "kv_cache_spec layer_names vllm_config device",
    f"{_ATTENTION}:AscendAttentionBackendImpl.forward": "layer query key value kv_cache attn_metadata output",
    f"{_ATTENTION}:AscendAttentionState.DecodeOnly": "",
    f"{_GRAPHS}:ACLGraphWrapper": "",
    f"{_GRAPHS}:GraphParams": "events handles attn_params",
}
SEAMS = STAYED_SEAMS | {
    f"{_ATTENTION}:unified_ascend_attention_with_output": "query key value output layer_name",
    f"{_DISPATCHER}.token_dispatch": "hidden_states topk_weights topk_ids expert_map mc2_mask",
    f"{_DISPATCHER}.token_combine": "hidden_states",
    "vllm_ascend.utils:update_aclgraph_sizes": "vllm_config",
}
SOURCES: dict[str, str] = {}

# Bytes of scratch memory for a captured call: CANN 8.3 as published refuses to report the need for packed tokens (R37).
# The call takes any pointer and size. The need follows from its tiling, on at most 24 cores: 100 MiB on 8.3
# (prompt_flash_attention_tiling.cpp; 24 * 4 * (3 * 512 * 512 + 4 * 512 * 64) bytes and 16 MiB), 107.5 MiB from 8.5 on,
# with the keys of a request split over cores (fia_tiling_nonquant.cpp, CalcMaxWorkspaceSize of v8.5.0 to branch 9.1.0;
# 24 * 3 997 696 bytes and 16 MiB). The probe tests that it is enough.
WORKSPACE = 128 << 20
# It starts the next graph before the last one has ended (fixed in its #4233, #5966): wrong text, or a hang with full
# graphs. Without asynchronous scheduling the copy of each step's tokens happens to wait long enough.
REPLAYS_IN_ORDER = False
WITHOUT_ORDER: tuple[str, ...] = ()  # modes that become FULL_DECODE_ONLY with asynchronous scheduling
LAUNCHED: tuple[tuple[str, str], ...] = ()


def default_graphs(config: Any) -> str | None:
    """Returns the mode of graphs where the user chose none; None leaves it to vLLM: PIECEWISE."""


def runs_ahead(config: Any) -> bool:
    """True if a step is scheduled before the last one has ended."""
    return bool(config.scheduler_config.async_scheduling)


def layout_objection(parallel: Any) -> str | None:
    """Returns the reason why this layout cannot capture whole decode steps; None if it can."""
    if parallel.pipeline_parallel_size > 1:
        return "vllm-ascend 0.11.0 captures no stage of a pipeline as a whole"
    if parallel.data_parallel_size > 1:
        # a rank without requests replays its decode graph while another computes a prompt of a captured size: the
        # graph gathers while the other rank multicasts, and each receives the wrong data
        return "vllm-ascend 0.11.0 lets one rank of data parallelism replay decodes while another computes a prompt"
    return None


def guard(runner: Any, fits: Callable[[tuple[int, ...]], bool]) -> None:
    """Runs steps whose lengths do not fit one call without a graph. vLLM chooses the graph after the metadata."""
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
    """The operator that splits compiled graphs; it calls the layer's implementation again."""
    import torch

    torch.ops.vllm.unified_ascend_attention_with_output(query, key, value, output, layer_name)


def comm_method() -> Any:
    """Returns the step's way of sending tokens to their experts."""
    from vllm.forward_context import get_forward_context

    return get_forward_context().moe_comm_method


def written(rows: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Zeroes, in place, rows that MC2 does not write: a graph's padding. Old memory may hold NaN there, and the next
    layer's routing would read it. mask: [rows] bool, True for written rows; None: all are written."""
    return rows if mask is None else rows.masked_fill_(mask.logical_not()[:, None], 0)


def dispatch(
    method: Any,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    mc2_mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, int, Callable[[torch.Tensor], torch.Tensor]]:
    """Returns the rows by expert, the groups and their kind, and a function that sends the rows back."""
    given = method.token_dispatcher.token_dispatch(
        hidden_states=x, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, mc2_mask=method.mc2_mask
    )

    def combine(rows: torch.Tensor) -> torch.Tensor:
        return written(method.token_dispatcher.token_combine(hidden_states=rows), method.mc2_mask)

    return given["hidden_states"], given["group_list"], given["group_list_type"], combine


def experts_result(hidden_states: torch.Tensor) -> torch.Tensor:
    """Converts to the type that the layer expects from `apply`."""
    return hidden_states


def mc2_rows(config: Any) -> int:
    """Returns how many rows a rank sends to experts at once by MC2, at most (_init_mc2_tokens_capacity)."""
    sizes = config.compilation_config.cudagraph_capture_sizes
    most = sizes[0] if sizes else min(config.scheduler_config.max_num_seqs, 512)
    return -(-most // config.parallel_config.tensor_parallel_size)


def capture_piecewise(config: Any) -> None:
    """Repeats vllm-ascend's settings for PIECEWISE, in its order."""
    from vllm.config import CUDAGraphMode
    from vllm_ascend.utils import update_aclgraph_sizes

    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
    missing = {"vllm.unified_ascend_attention_with_output", "vllm.mla_forward"} - set(compilation.splitting_ops)
    compilation.splitting_ops.extend(sorted(missing))
    update_aclgraph_sizes(config)


def decode_rows(runner: Any) -> int:
    """Returns the rows of a request in a decode step."""
    return runner.uniform_decode_query_len


def captured(runner: Any) -> dict[str, list[int]]:
    """Returns the sizes of the captured graphs, by mode."""
    keys = runner.aclgraph_dispatcher.cudagraph_keys if runner.use_aclgraph else {}
    most = runner.scheduler_config.max_num_seqs * runner.uniform_decode_query_len
    found = {mode.name: {each.num_tokens for each in sizes} for mode, sizes in keys.items()}
    if "FULL" in found:
        found["FULL"] = {size for size in found["FULL"] if size <= most}
    return {mode: sorted(sizes) for mode, sizes in found.items() if sizes}


@contextlib.contextmanager
def watching(runner: Any, watch: Watch) -> Iterator[None]:
    """Lets the canary choose steps without a graph, and see how each step runs and what it gives the vocabulary."""
    from vllm.config import CUDAGraphMode

    dispatcher, model = runner.aclgraph_dispatcher, runner.get_model()
    right, logits = dispatcher.dispatch, model.compute_logits

    def dispatch(*given: Any, **options: Any) -> tuple[CUDAGraphMode, Any]:
        mode, found = (CUDAGraphMode.NONE, None) if watch.eager else right(*given, **options)
        watch.mode, watch.size = mode.name, found.num_tokens if found else 0
        return mode, found

    def compute_logits(rows: torch.Tensor) -> torch.Tensor | None:
        watch.hidden = rows
        return logits(rows)

    with (
        mock.patch.object(dispatcher, "dispatch", dispatch),
        mock.patch.object(model, "compute_logits", compute_logits),
    ):
        yield


def empty_step() -> Any:
    from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput

    return SchedulerOutput(
        scheduled_new_reqs=[],
        scheduled_cached_reqs=CachedRequestData.make_empty(),
        num_scheduled_tokens={},
        total_num_scheduled_tokens=0,
        scheduled_spec_decode_tokens={},
        scheduled_encoder_inputs={},
        num_common_prefix_blocks=[],
        finished_req_ids=set(),
        free_encoder_mm_hashes=[],
        structured_output_request_ids={},
        grammar_bitmask=None,
    )


def last_rows(worker: Any, watch: Watch) -> tuple[list[str], torch.Tensor | None]:
    """Returns the requests of the step that has just run, and their last rows."""
    rows, watch.hidden = watch.hidden, None
    return list(worker.model_runner.input_batch.req_ids), rows


def leave_full_graphs(worker: Any) -> None:
    """Compiles the model again, split at attention, and captures the pieces in the place of whole steps."""
    from vllm.compilation.wrapper import TorchCompileWrapperWithCustomDispatcher
    from vllm.config import CUDAGraphMode, set_current_vllm_config

    runner, config = worker.model_runner, worker.vllm_config
    capture_piecewise(config)
    runner.model = runner.get_model()  # without the wrapper that holds the graphs
    forget_calls()
    config.compilation_config.cache_dir = config.compilation_config.local_cache_dir = ""
    inner = runner.model.model
    with set_current_vllm_config(config):
        TorchCompileWrapperWithCustomDispatcher.__init__(inner, compilation_level=config.compilation_config.level)
    runner.aclgraph_batch_sizes = sorted(config.compilation_config.cudagraph_capture_sizes)
    runner.aclgraph_dispatcher = type(runner.aclgraph_dispatcher)(config)
    runner._dummy_run(max(runner.aclgraph_batch_sizes), aclgraph_runtime_mode=CUDAGraphMode.NONE)
    runner.capture_model()


def forget_calls() -> None:
    """Drops the attention calls of captured steps."""
    from vllm_ascend.compilation.acl_graph import get_graph_params

    if params := get_graph_params():
        for kept in (params.events, params.handles, params.attn_params):
            for calls in kept.values():
                calls.clear()
