"""Whether the attention call can be captured, updated and replayed here: tried before anything depends on it."""

from __future__ import annotations

from typing import Any

import torch

from npu_gptoss.attention.ascend import call_arguments, no_lse
from npu_gptoss.serving.ascend import full_graph

BLOCK_SIZE = 128
CAPTURED, REPLAYED = [1, 1], [200, 77]  # keys of the two requests


def full_graph_objection(
    *, heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why not, in words; None when a window layer and a full layer both follow their updates."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    query, sinks = normal(2, heads, head_dim), normal(heads)
    key_cache, value_cache = (normal(5, BLOCK_SIZE, kv_heads, head_dim) for _ in range(2))
    block_table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32).to(device)
    for name, sliding_window in (("a full layer", None), ("a window layer", window)):
        arguments = call_arguments(
            query,
            key_cache,
            value_cache,
            query_ends=[1, 2],
            seq_lens=CAPTURED,
            block_table=block_table,
            sinks=sinks,
            scale=head_dim**-0.5,
            sliding_window=sliding_window,
        )
        try:
            want, got = _eager_and_replayed(arguments, sliding_window)
        except Exception as error:  # whatever the driver, the graph or the operator has against it
            return f"{name}: {_one_line(error)}"
        if not torch.allclose(got.float(), want.float(), atol=2**-8, rtol=2**-6):
            return f"{name}: the replayed call did not follow its update"
    return None


def _eager_and_replayed(arguments: dict[str, Any], window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    query, workspace = arguments["query"], full_graph.workspace(arguments, window)
    want, got = torch.zeros_like(query), torch.zeros_like(query)
    lse = no_lse(query.device)
    full_graph.Call("eager", arguments, workspace, [want, lse]).issue([1, 2], REPLAYED)
    call = full_graph.Call("probe", arguments, workspace, [got, lse])
    torch.npu.synchronize()
    graph, update_stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        handle, event = full_graph.record(call, [1, 2], CAPTURED)
    graph.replay()
    with torch.npu.stream(update_stream):
        full_graph.update(update_stream, call, handle, event, ([1, 2], REPLAYED))
    torch.npu.synchronize()
    return want.cpu(), got.cpu()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:400] or type(error).__name__
