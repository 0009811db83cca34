"""Attention calls inside a captured graph of decode steps: recorded once, updated with each step's lengths.

A captured operator keeps its host arguments, so each attention call is recorded as a task group behind an event. For
every replay another stream issues the call again with the step's lengths, then the event (torch_npu:
`graph_task_group_*`, `graph_task_update_*`, `ExternalEvent`). vllm-ascend 0.11.0 does so for its paged attention only,
0.23 for the calls of its own backend; this module does so for ours. vllm-ascend still decides on graphs, streams and
the moment of the update, and keeps the lists of handles and events. Our entries carry the layer's name, so that a
window layer never gets another layer's lengths or arguments.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.attention.ascend import call_arguments, no_lse
from npu_gptoss.serving import compat, releases
from npu_gptoss.serving.releases.vllm import CUDAGraphMode

if TYPE_CHECKING:
    from npu_gptoss.serving.attention import SinkAttentionImpl
    from npu_gptoss.serving.releases.vllm import ForwardContext, VllmConfig

LENGTHS = "ascend-full-graph"  # the patch that sends captured calls each step's lengths
# Each is larger than the one before. The last serves all calls, which run one by one; graphs may use the others.
_workspaces: list[torch.Tensor] = []
_asked: set[tuple[int | None, int]] = set()  # (window, rows) whose size the operator has reported
_set_aside: list[torch.Tensor] = []  # a workspace to be allocated again: its size, on no device


@dataclass(frozen=True)
class Call:
    """A layer's captured attention call, with everything that a repetition with other lengths needs.

    each: rows of a request, more than one with drafts.
    """

    layer_name: str
    arguments: dict[str, Any]
    workspace: torch.Tensor
    out: list[torch.Tensor]
    each: int = 1

    def issue(self, query_ends: list[int], seq_lens: list[int]) -> None:
        import torch_npu

        torch_npu.npu_fused_infer_attention_score_v2.out(
            **{**self.arguments, "actual_seq_qlen": query_ends, "actual_seq_kvlen": seq_lens},
            workspace=self.workspace,
            out=self.out,
        )


def capturing(context: ForwardContext) -> bool:
    return context.capturing and context.cudagraph_runtime_mode == CUDAGraphMode.FULL


def padded_lengths(metadata: AttentionMetadata, rows: int, each: int = 1) -> tuple[list[int], list[int]]:
    """Returns both lists for a graph of decode rows, `each` a request: a padding request sees its own rows."""
    key = ("full_graph", rows)
    if key not in metadata.plans:
        real = metadata.num_requests
        if metadata.num_tokens != real * each or metadata.num_tokens > rows or rows % each:
            raise RuntimeError(
                f"a graph of {rows} decode rows, {each} a request, was chosen for {real} requests with "
                f"{metadata.num_tokens} rows"
            )
        lengths = [*metadata.seq_lens, *[each] * (rows // each - real)]
        metadata.plans[key] = list(range(each, rows + 1, each)), lengths
    return metadata.plans[key]


def workspace(arguments: dict[str, Any], window: int | None) -> torch.Tensor:
    """Returns scratch memory for a call of this size. It is never freed, because graphs hold its address."""
    import torch_npu

    from npu_gptoss.serving.releases.ascend import WORKSPACE

    if _set_aside:
        raise AssertionError("the workspace of the start's probe was not taken up while the model was loaded")
    asked = (window, arguments["query"].shape[0])
    if asked not in _asked:
        try:
            largest = torch_npu._npu_fused_infer_attention_score_v2_get_max_workspace(**arguments)
        except RuntimeError:
            installed = importlib.metadata.version("torch-npu")
            if WORKSPACE is None or not releases.ascend_release().torch_npu.has(installed):
                raise
            largest = torch.empty(WORKSPACE, dtype=torch.uint8, device="meta")
        if not _workspaces or _workspaces[-1].nbytes < largest.nbytes:
            on_device = largest.device.type != "meta"
            _workspaces.append(largest if on_device else torch.empty_like(largest, device=arguments["query"].device))
        _asked.add(asked)
    return _workspaces[-1]


def set_aside() -> None:
    """Frees all workspaces, which no graph uses yet, and remembers the largest size.

    What lies on the device before the model does is in no account of vLLM's: with the workspaces of the start's probe
    there the KV cache got more memory than was left."""
    _set_aside[:] = [largest.to("meta") for largest in _workspaces[-1:]]
    _workspaces.clear()
    torch.npu.empty_cache()


def take_up(device: torch.device) -> None:
    """Allocates again what was set aside. Called while the model loads, so that vLLM counts it as the model's."""
    _workspaces.extend(torch.empty_like(size, device=device) for size in _set_aside)
    _set_aside.clear()


def capture(
    impl: SinkAttentionImpl,
    layer_name: str,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    output: torch.Tensor,
) -> torch.Tensor:
    """Records the layer's call into the graph under capture. Shapes as in `paged_attention`; all requests have as many
    rows."""
    from npu_gptoss.serving.releases.ascend import get_graph_params, weak_ref_tensors

    if not any(each.patch.name == LENGTHS and each.state == "applied" for each in compat.status()):
        raise RuntimeError(
            f"FULL_DECODE_ONLY needs the patch {LENGTHS}, which was left out: "
            'use --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\''
        )
    rows = query.shape[0]
    each = metadata.max_query_len
    query_ends, seq_lens = padded_lengths(metadata, rows, each)
    arguments = call_arguments(
        query,
        key_cache,
        value_cache,
        query_ends=query_ends,
        seq_lens=seq_lens,
        block_table=metadata.block_table,
        sinks=impl.sinks,
        scale=impl.scale,
        sliding_window=impl.window,
    )
    # The graph's pool owns query and output; a reference here would keep their memory from being used again.
    call = Call(
        layer_name,
        {**arguments, "query": weak_ref_tensors(query)},
        workspace(arguments, impl.window),
        [weak_ref_tensors(output), no_lse(query.device)],
        each,
    )
    handle, event = record(call, query_ends, seq_lens)
    params = get_graph_params()
    params.attn_params[rows].append(call)
    params.handles[rows].append(handle)
    params.events[rows].append(event)
    return output


def record(call: Call, query_ends: list[int], seq_lens: list[int]) -> tuple[Any, Any]:
    """Records the call as a task group that waits for an event; returns its handle and the event."""
    stream = torch.npu.current_stream()
    event = torch.npu.ExternalEvent()
    event.wait(stream)
    event.reset(stream)
    torch.npu.graph_task_group_begin(stream)
    call.issue(query_ends, seq_lens)
    return torch.npu.graph_task_group_end(stream), event


def update(stream: Any, call: Call, handle: Any, event: Any, lengths: tuple[list[int], list[int]]) -> None:
    """Sends a replayed call its lengths; `stream` is current and is not the replaying stream."""
    torch.npu.graph_task_update_begin(stream, handle)
    call.issue(*lengths)
    torch.npu.graph_task_update_end(stream)
    event.record(stream)


def update_step(update_stream: Any, forward_context: ForwardContext, rows: int) -> bool:
    """Sends our calls in the graph of this size the step's lengths; False if its calls are not ours."""
    from npu_gptoss.serving.releases.ascend import get_graph_params

    params = get_graph_params()
    calls = params.attn_params[rows]
    if not calls or not isinstance(calls[0], Call):
        return False
    recorded = list(zip(calls, params.handles[rows], params.events[rows], strict=True))
    updated = 0
    try:
        with torch.npu.stream(update_stream):
            for call, handle, event in recorded:
                lengths = padded_lengths(forward_context.attn_metadata[call.layer_name], rows, call.each)
                update(update_stream, call, handle, event, lengths)
                updated += 1
    except BaseException:
        release([event for _, _, event in recorded[updated:]])
        raise
    return True


def release(events: Sequence[Any]) -> None:
    """Ends a replayed graph whose calls got no lengths. Its results are invalid, but the engine can report the error.

    Uses a separate stream, because the update's stream may be blocked in a refused update.
    """
    stream = torch.npu.Stream()
    for event in events:
        event.record(stream)


def fits_one_call(seq_lens: tuple[int, ...], config: VllmConfig) -> bool:
    """True if a graph's single call takes this step: with a shared prefix its count of blocks may exceed the cache.

    The operator counts a shared block for each request that reads it, and a block for each padding row.
    """
    blocks, block_size = config.cache_config.num_gpu_blocks, config.cache_config.block_size
    needed = sum(-(-length // block_size) for length in seq_lens) + config.scheduler_config.max_num_seqs
    return blocks is None or needed <= blocks
