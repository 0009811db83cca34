"""Calls that make each classic mistake of a gpt-oss port large.

Sinks weigh as much as the keys, keys stand on both sides of the window's edge, biases are as large as the products,
activations exceed the clamp. A wrong result is explained by the mutation of `verify` that gives the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from npu_gptoss.attention.operations import PAGED
from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import expert_mlp, prepare_experts, route
from npu_gptoss.moe.operations import EXPERTS
from npu_gptoss.verify.attention_cases import WINDOW, Shape, make_step, plant
from npu_gptoss.verify.cases import Inputs, on
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.compare import FAILED, Outputs, Result, by_rows, checked, compare
from npu_gptoss.verify.moe_cases import expert_inputs
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.attention import SHAPE, UNUSED
from npu_gptoss.verify.tolerances import ROWS

Made = tuple[Inputs, Callable[[], torch.Tensor]]

ONE_GROUP = replace(SHAPE, heads=8, kv_heads=1)
LIMITS = {"out": ROWS}
# (query rows, keys) of each request, shape, window
STEPS: dict[str, tuple[tuple[list[tuple[int, int]], Shape, int | None], ...]] = {
    "sink": (([(40, 40), (1, 200), (130, 300)], SHAPE, None),),
    "window": (
        ([(1, 400), (1, 400)], ONE_GROUP, WINDOW),
        ([(1, 400), (1100, 1100)], ONE_GROUP, WINDOW),
        ([(1, 400)], ONE_GROUP, None),
    ),
}
# the factor of down's bias, so that it weighs as much as the products; the experts of a token
LAYERS: dict[str, tuple[int, int]] = {"bias": (8, 4), "activation": (1, 1)}


def attention(name: str, rank: Rank) -> Iterator[Made]:
    """Yields for each call the inputs of the definition, and its run on the device, which writes its keys first."""
    for requests, shape, window in STEPS[name]:
        step = make_step(requests, shape, torch.Generator().manual_seed(1), unused=UNUSED)
        if window:
            plant(step, window)
        step = step.to("cpu", rank.dtype)
        yield step.inputs(window), lambda step=step, window=window: step.written(rank.device).attend(window)


def experts(name: str, rank: Rank) -> Iterator[Made]:
    bias, top_k = LAYERS[name]
    generator = torch.Generator().manual_seed(2)
    inputs = expert_inputs("bfloat16", rank.dtype, generator, 33, hidden=256, inner=256, top_k=top_k)
    weights = inputs["weights"]
    inputs["weights"] = replace(weights, down_proj_bias=bias * weights.down_proj_bias)

    def run() -> torch.Tensor:
        there = on(inputs, rank.device)
        return expert_mlp(there["hidden_states"], prepare_experts(there["weights"]), *route(there["logits"], top_k))

    yield inputs, run


def results(name: str, rank: Rank) -> Iterator[Result]:
    """The calls of one of STEPS or LAYERS, up to the first wrong one."""
    paged = name in STEPS
    check = CHECKS[PAGED.name if paged else EXPERTS.name]
    for number, (inputs, run) in enumerate((attention if paged else experts)(name, rank)):
        with platform_override("cpu"):
            want = check.definition(inputs)
        call = f"{name}, call {number + 1}"
        result, got = checked(call, lambda run=run: {"out": run().cpu()}, by_rows(want), repeats=rank.repeats)
        if result.state == FAILED and got:
            with platform_override("cpu"):
                mistake = explained(check.name, inputs, got)
            result = replace(result, lines=(": ".join(filter(None, (*result.lines, mistake))),))
        yield result
        if result.wrong:
            return


def explained(check: str, inputs: Inputs, got: Outputs) -> str:
    """The known mistake that gives this result; empty when none does."""
    limits = {"out": replace(ROWS, of_row=2 * ROWS.of_row)}
    for mutation in CHECKS[check].mutations:
        answer = mutation.answer(inputs, CHECKS[check].definition)
        if answer is not None and compare(got, answer, limits).ok:
            return mutation.name
    return ""


CLASSIC = {name: partial(results, name) for name in (*STEPS, *LAYERS)}
