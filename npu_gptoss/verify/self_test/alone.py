"""Self-tests in processes of their own: weights in FRACTAL_NZ, and a graph, whose replay may hang.

Formats: op-plugin before torch-npu 2.7.1.post7 distinguishes the cached calls of one aclnn function by shapes and
dtypes, not by formats, so that earlier calls in ND must not decide which kernel runs. The grouped matmul has a function
for each format; torch's linear is called in the order that would show it. Graph: routing and experts are captured once
and replayed with other inputs, without a wait in between.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.graphs.recorder import Recorder
from npu_gptoss.moe import expert_mlp, prepare_experts, route
from npu_gptoss.moe.expert_format import FRACTAL_NZ, VARIABLE
from npu_gptoss.verify.compare import FAILED, Outputs, Result, by_rows, checked
from npu_gptoss.verify.moe_cases import TOP_K
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.experts import CASES, Layer, results_of

CAST = "npu_format_cast, where torch-npu allows no internal format"
CACHE = "the cache of executors knows no format (op-plugin, repaired in torch-npu 2.7.1.post7)"
ROWS_CAPTURED, REPLAYS = 16, 50
SUSPECT = "work on a second stream that a capture loses, or inputs that change before the previous replay has read them"


def formats(rank: Rank) -> Iterator[Result]:
    yield from experts(rank)
    yield from linear(rank)


def experts(rank: Rank) -> Iterator[Result]:
    """The short cases of experts with their weights in FRACTAL_NZ. The variable stays set."""
    os.environ[VARIABLE] = "nz"
    cases = [case for case in CASES if not case.later and not case.of_part]
    try:
        for result in results_of(cases, replace(rank, repeats=2)):
            yield replace(result, call=f"{result.call}, in FRACTAL_NZ", suspect="aclnnGroupedMatmulWeightNz")
    except InputError as error:  # the weights stayed in ND
        yield Result("experts in FRACTAL_NZ", FAILED, 0.0, (str(error),), suspect=CAST)


def linear(rank: Rank) -> Iterator[Result]:
    """The same product with the weight in ND, in FRACTAL_NZ and in ND again; x is two-dimensional."""
    import torch_npu

    torch.npu.config.allow_internal_format = True  # off by default from torch-npu 2.7.1.post4 on
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn(rank.hidden, rank.hidden, generator=generator) * rank.hidden**-0.5).to(rank.dtype)
    plain = weight.to(rank.device)
    cast = torch_npu.npu_format_cast(plain, FRACTAL_NZ)
    if (found := int(torch_npu.get_npu_format(cast))) != FRACTAL_NZ:
        yield Result("linear in FRACTAL_NZ", FAILED, 0.0, (f"the weight has format {found} after the cast",), "", CAST)
        return
    for rows in (1, 64):
        x = torch.randn(rows, rank.hidden, generator=generator).to(rank.dtype)
        want = dict.fromkeys(("ND", "NZ", "ND again"), torch.nn.functional.linear(x.float(), weight.float()))

        def run(x: torch.Tensor = x) -> Outputs:
            weights = {"ND": plain, "NZ": cast, "ND again": plain}
            return {name: torch.nn.functional.linear(x.to(rank.device), w).cpu() for name, w in weights.items()}

        yield checked(f"linear of {rows} rows in ND, FRACTAL_NZ and ND", run, by_rows(want), suspect=CACHE)[0]


def graph(rank: Rank) -> Iterator[Result]:
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
    result, got = checked(call, run, by_rows(want), suspect=SUSPECT)
    if not result.wrong and not torch.equal(got["out"][-ROWS_CAPTURED:], got["out"][:ROWS_CAPTURED]):
        result = result.failed("the inputs of the first replay gave other bits in the last")
    yield result
