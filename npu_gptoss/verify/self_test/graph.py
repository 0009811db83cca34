"""Routing and experts captured once and replayed with other inputs, without a wait in between."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_gptoss.graphs.recorder import Recorder
from npu_gptoss.moe import expert_mlp, prepare_experts, route
from npu_gptoss.verify.cases import TOP_K
from npu_gptoss.verify.compare import Outputs, Result, rows_checked
from npu_gptoss.verify.depth import Depth, Rank
from npu_gptoss.verify.self_test.experts import Layer

ROWS_CAPTURED, REPLAYS = 16, 50
SUSPECT = "work on a second stream that a capture loses, or inputs that change before the previous replay has read them"


def results(rank: Rank, depth: Depth) -> Iterator[Result]:
    """All results are compared after one wait. The last replay has the inputs of the first."""
    layer = Layer.random(rank)
    prepared = prepare_experts(layer.weights())
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(REPLAYS, ROWS_CAPTURED, rank.hidden, generator=generator).to(rank.dtype)
    # no two logits of a row are alike, so there is one right choice
    logits = torch.rand(REPLAYS, ROWS_CAPTURED, rank.experts, generator=generator).argsort(-1).to(rank.dtype) / 8
    inputs[-1], logits[-1] = inputs[0], logits[0]
    best = logits.float().flatten(0, 1).topk(TOP_K)
    want = {"out": layer.want(inputs.flatten(0, 1), best.values.softmax(-1), best.indices)}

    def run() -> Outputs:
        all_inputs, all_logits = inputs.to(rank.device), logits.to(rank.device)
        hidden, scores = all_inputs[0].clone(), all_logits[0].clone()
        recorded = Recorder(rank.device).record(lambda: expert_mlp(hidden, prepared, *route(scores, TOP_K)))
        kept = []
        for replay in range(REPLAYS):
            hidden.copy_(all_inputs[replay])
            scores.copy_(all_logits[replay])
            kept.append(recorded.replay().clone())
        return {"out": torch.cat(kept).cpu()}

    call = f"experts in a graph, {REPLAYS} replays"
    result, got = rows_checked(call, run, want, suspect=SUSPECT)
    if not result.wrong and not torch.equal(got["out"][-ROWS_CAPTURED:], got["out"][:ROWS_CAPTURED]):
        result = result.failed("the inputs of the first replay gave other bits in the last")
    yield result
