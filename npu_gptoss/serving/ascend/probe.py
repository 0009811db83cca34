"""Tests at the start that this card can capture, update and replay the attention call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_gptoss.attention.ascend import call_arguments, no_lse
from npu_gptoss.attention.padding import with_slack
from npu_gptoss.errors import short
from npu_gptoss.serving.ascend import captured

BLOCK_SIZE = 128
CAPTURED = 77  # keys of each request
# keys of each request in the later replays, for two batch sizes: over a tile of 512 keys, and back
REPLAYED = (([1100, 200], [77, 1]), ([4097, 1, 513, 1], [77, 77, 77, 77], [4097, 1, 513, 1], [77, 77, 77, 77]))


def full_graph_objection(
    *, heads: int, kv_heads: int, head_dim: int, window: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Returns the reason against full graphs; None if a window layer and a full layer both follow their updates."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    for replays in REPLAYED:
        requests = len(replays[0])
        blocks = -(-max(map(max, replays)) // BLOCK_SIZE)
        table = 1 + torch.arange(requests * blocks, dtype=torch.int32).view(requests, blocks)
        query, sinks = normal(requests, heads, head_dim), with_slack(normal(heads))
        key_cache, value_cache = (normal(1 + table.numel(), BLOCK_SIZE, kv_heads, head_dim) for _ in range(2))
        for name, sliding_window in (("a full layer", None), ("a window layer", window)):
            arguments = call_arguments(
                query,
                key_cache,
                value_cache,
                query_ends=list(range(1, requests + 1)),
                seq_lens=[CAPTURED] * requests,
                block_table=table.to(device),
                sinks=sinks,
                scale=head_dim**-0.5,
                sliding_window=sliding_window,
            )
            try:
                pairs = _eager_and_replayed(arguments, sliding_window, replays)
            except Exception as error:  # from the driver, the graph or the operator
                return f"{name}: {short(' '.join(str(error).split()), 400) or type(error).__name__}"
            first: dict[tuple[int, ...], torch.Tensor] = {}
            for lengths, (want, got) in zip(replays, pairs, strict=True):
                if not torch.allclose(got.float(), want.float(), atol=2**-8, rtol=2**-6):
                    return f"{name}: the replayed call did not follow its update to {lengths} keys"
                if not torch.equal(first.setdefault(tuple(lengths), got), got):
                    return f"{name}: two replays with {lengths} keys gave other bits"
    return None


def _eager_and_replayed(
    arguments: dict[str, Any], window: int | None, replays: Sequence[list[int]]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the result of an eager call and of the replayed call for each replay.

    Here the update precedes the replay. In service the replay comes first; a probe in that order would hang on a
    refused update, and the card could then not run PIECEWISE either.
    """
    query, workspace = arguments["query"], captured.workspace(arguments, window)
    ends, at_capture = arguments["actual_seq_qlen"], arguments["actual_seq_kvlen"]
    got, lse = torch.zeros_like(query), no_lse(query.device)
    call = captured.Call("probe", arguments, workspace, [got, lse])
    torch.npu.synchronize()
    graph, update_stream = torch.npu.NPUGraph(), torch.npu.Stream()
    with torch.npu.graph(graph):
        handle, event = captured.record(call, ends, at_capture)
    pairs = []
    for lengths in replays:
        want = torch.zeros_like(query)
        captured.Call("eager", arguments, workspace, [want, lse]).issue(ends, lengths)
        torch.npu.synchronize()
        with torch.npu.stream(update_stream):
            captured.update(update_stream, call, handle, event, (ends, lengths))
        graph.replay()
        torch.npu.synchronize()
        pairs.append((want.cpu(), got.cpu()))
    return pairs
