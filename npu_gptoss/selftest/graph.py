"""Routing and experts captured once and replayed with other inputs, without a wait in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from npu_gptoss.graphs.recorder import Recorder
from npu_gptoss.moe import expert_mlp, prepare_experts, route
from npu_gptoss.selftest.experts import TOP_K, Layer, Sizes
from npu_gptoss.selftest.outcome import Outcome, deviation, judged

ROWS, REPLAYS = 16, 50
SUSPECT = (
    "work on a second stream that a capture loses, or inputs that are written before the replay before has read them"
)


def outcomes(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Iterator[Outcome]:
    """Every result is kept and looked at after one wait; the last replay has the first one's inputs."""
    layer = Layer.random(sizes, 1.0, dtype)
    prepared = prepare_experts(layer.weights(device))
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(REPLAYS, ROWS, sizes.hidden, generator=generator).to(dtype)
    # no two logits of a row are alike, so that the choice is one
    logits = torch.rand(REPLAYS, ROWS, sizes.experts, generator=generator).argsort(-1).to(dtype) / 8
    inputs[-1], logits[-1] = inputs[0], logits[0]
    all_inputs, all_logits = inputs.to(device), logits.to(device)
    hidden, scores = all_inputs[0].clone(), all_logits[0].clone()
    recorded = Recorder(device).record(lambda: expert_mlp(hidden, prepared, *route(scores, TOP_K)))
    kept = []
    for replay in range(REPLAYS):
        hidden.copy_(all_inputs[replay])
        scores.copy_(all_logits[replay])
        kept.append(recorded.replay().clone())
    got = torch.stack(kept).cpu()
    best = logits.float().flatten(0, 1).topk(TOP_K)
    want = layer.want(inputs.flatten(0, 1), best.values.softmax(-1), best.indices)
    outcome = judged(f"experts in a graph, {REPLAYS} replays", SUSPECT, deviation(got.flatten(0, 1), want))
    if not outcome.problem and not torch.equal(got[-1], got[0]):
        outcome = replace(outcome, problem="the first replay's inputs gave other bits in the last")
    yield outcome
