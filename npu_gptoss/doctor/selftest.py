"""Ten seconds of arithmetic on the device at hand: kernels as they are selected for it, against the definition.

The quick tests are calls of `npu-gptoss verify` that make each classic mistake large: sinks that weigh as much as the
keys, keys planted at both sides of the window's edge, biases as large as the products, activations beyond the clamp.
Where a result is wrong, the mutation of `verify` that explains it is named. The other tests make the calls that known
defects of CANN get wrong, or that stand at an edge of its kernels (`npu_gptoss.selftest`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from npu_gptoss import envs
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, one_line, warning
from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import expert_mlp, prepare_experts, route
from npu_gptoss.moe.operations import EXPERTS
from npu_gptoss.selftest import attention, dense, experts, formats, graph
from npu_gptoss.selftest.attention import HEAD_DIM, RANK, UNUSED
from npu_gptoss.selftest.experts import Sizes
from npu_gptoss.selftest.outcome import LIMIT, Outcome, deviation
from npu_gptoss.verify.calls import Check
from npu_gptoss.verify.cases import WINDOW, Inputs, Shape, expert_inputs, make_step, on, plant
from npu_gptoss.verify.checks import CHECKS

DTYPE = torch.bfloat16
WRONG = "Text would be wrong without a word: do not serve with it. "
REMEDY = (
    WRONG + "`kernels` above names the kernel; {} falls back to plain torch operators. Please report it with "
    "`npu-gptoss doctor --json`."
)
OTHER_CANN = WRONG + "Install another release of CANN, and report it with `npu-gptoss doctor --json`."
_ATTENTION = "NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops"
_EXPERTS = "NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops (with --enforce-eager on Ascend)"

ONE_GROUP = replace(RANK, heads=8, kv_heads=1)
# (query rows, keys) of each request, shape, window
STEPS: dict[str, tuple[tuple[list[tuple[int, int]], Shape, int | None], ...]] = {
    "self-test-sink": (([(40, 40), (1, 200), (130, 300)], RANK, None),),
    "self-test-window": (
        ([(1, 400), (1, 400)], ONE_GROUP, WINDOW),
        ([(1, 400), (1100, 1100)], ONE_GROUP, WINDOW),
        ([(1, 400)], ONE_GROUP, None),
    ),
}
# how often the bias of down is taken, so that it weighs as much as its products, and the experts of a token
LAYERS: dict[str, tuple[int, int]] = {"self-test-bias": (8, 4), "self-test-activation": (1, 1)}
TITLES = {
    "self-test-sink": "Attention with sinks",
    "self-test-window": f"The window of {WINDOW} keys, and a layer without one",
    "self-test-bias": "Routing and experts with biases",
    "self-test-activation": "gpt-oss's activation",
}


def quick_attention(check: str) -> Iterator[tuple[Inputs, Callable[[torch.device], torch.Tensor]]]:
    """Of each call what the definition gets, and how the device computes it; its own keys are written there first."""
    for requests, shape, window in STEPS[check]:
        step = make_step(requests, shape, torch.Generator().manual_seed(1), unused=UNUSED)
        if window:
            plant(step, window)
        step = step.to("cpu", DTYPE)
        yield step.inputs(window), lambda device, step=step, window=window: step.written(device).attend(window)


def quick_experts(check: str) -> Iterator[tuple[Inputs, Callable[[torch.device], torch.Tensor]]]:
    bias, top_k = LAYERS[check]
    generator = torch.Generator().manual_seed(2)
    inputs = expert_inputs("bfloat16", DTYPE, generator, 33, hidden=256, inner=256, top_k=top_k)
    weights = inputs["weights"]
    inputs["weights"] = replace(weights, down_proj_bias=bias * weights.down_proj_bias)

    def run(device: torch.device) -> torch.Tensor:
        there = on(inputs, device)
        chosen = route(there["logits"], inputs["topk_ids"].shape[1])
        return expert_mlp(there["hidden_states"], prepare_experts(there["weights"]), *chosen)

    yield inputs, run


def quick(check: str, device: torch.device) -> Iterator[Finding]:
    """Calls of `verify`; a wrong result is explained by one of its mutations."""
    paged = check in STEPS
    definition = CHECKS[PAGED.name if paged else EXPERTS.name]
    worst = 0.0
    for inputs, run in (quick_attention if paged else quick_experts)(check):
        got = run(device).cpu()
        with platform_override("cpu"):
            found = deviation(got, definition.definition(inputs)["out"])
            worst = max(worst, found)
            if found > LIMIT:
                size = "NaN or Inf" if found == float("inf") else f"{found:.0%} from the definition"
                name = explained(definition, inputs, got)
                remedy = REMEDY.format(_ATTENTION if paged else _EXPERTS)
                yield failed(f"{TITLES[check]}: {size}{f': {name}' if name else ''}.", remedy)
                return
    yield ok(f"{TITLES[check]}: {worst:.2%} from the definition, at most {LIMIT:.2%} is rounding.")


def explained(check: Check, inputs: Inputs, got: torch.Tensor) -> str:
    """The known mistake that gives this result; empty when none does."""
    for mutation in check.mutations:
        answer = mutation.answer(inputs, check.definition)
        if answer is not None and deviation(got, answer["out"]) <= 2 * LIMIT:
            return mutation.name
    return ""


# of gpt-oss-20b on one card; on a CPU and on the emulated 910B, where these take long, small ones
PUBLISHED = Sizes(hidden=2880, inner=2880, experts=32, held=(0, 32))
SMALL = Sizes(hidden=96, inner=64, experts=8, held=(0, 8))


def _is_slow(device: torch.device) -> bool:
    return device.type == "cpu" or envs.get("ASCEND_EMULATOR")


def attention_calls(check: str, device: torch.device) -> Iterator[Finding]:
    """Calls that known defects of CANN get wrong; where they take long, some of them with the heads of one key head."""
    cases = [case for case in attention.CASES if case.at_start or not _is_slow(device)]
    kv_heads, repeats = (1, 2) if _is_slow(device) else (8, 20)
    found = [
        outcome
        for case in cases
        for outcome in attention.outcomes(
            case, device, heads=8 * kv_heads, kv_heads=kv_heads, dtype=DTYPE, repeats=repeats
        )
    ]
    remedy = REMEDY.format(_ATTENTION)
    if all(outcome.merged_heads for outcome in found if outcome.problem):
        remedy = "A server goes round it by itself, with one line in its log. A newer CANN may have it mended."
    yield _all_right(found, repeats, remedy)


def moe(check: str, device: torch.device) -> Iterator[Finding]:
    """Routing and experts at the edges of their kernels, on a rank with all experts and on one with a quarter."""
    sizes, repeats = (SMALL, 2) if _is_slow(device) else (PUBLISHED, 5)
    part = replace(sizes, held=(sizes.experts // 4, sizes.experts // 2))
    found = [
        *experts.gates(experts.GATES, device, DTYPE),
        *experts.gates(experts.GATES, device, torch.float32),
        *experts.group_lists(sizes, device, DTYPE),
        *experts.outcomes([case for case in experts.CASES if not case.of_part], sizes, device, DTYPE, repeats),
        *experts.outcomes([case for case in experts.CASES if case.of_part], part, device, DTYPE, repeats),
    ]
    yield _all_right(found, repeats, REMEDY.format(_EXPERTS))


def around(check: str, device: torch.device) -> Iterator[Finding]:
    """Projections and norms; of norms narrower than gpt-oss's a word apart."""
    sizes, repeats = (SMALL, 2) if _is_slow(device) else (PUBLISHED, 5)
    shapes = dense.shapes(sizes.hidden, *((8, 2) if _is_slow(device) else (64, 8)), HEAD_DIM, sizes.experts)
    found = [
        *dense.projections(dense.CASES, shapes, device, DTYPE, repeats),
        *dense.norms(dense.NORM_ROWS[False], PUBLISHED.hidden, device, DTYPE, repeats),
    ]
    yield _all_right(found, repeats, OTHER_CANN)
    if narrow := [found for found in dense.norms(*dense.NARROW, device, DTYPE, repeats) if found.problem]:
        yield warning(
            "Norms up to 2000 wide are wrong on this card; gpt-oss's are 2880 wide, a tiny checkpoint's are not.",
            "Serve no tiny checkpoint on this CANN; CANN 9.0.0 has it mended.",
            details=tuple(outcome.sentence() for outcome in narrow),
        )


def nz(check: str, device: torch.device) -> Iterator[Finding]:
    """Weights in FRACTAL_NZ; in a process of its own, where no call in ND came before."""
    if device.type != "npu":
        yield not_applicable("FRACTAL_NZ is a format of Ascend.")
        return
    sizes = SMALL if _is_slow(device) else PUBLISHED
    found = [*formats.experts(sizes, device, DTYPE), *formats.linear(sizes, device, DTYPE)]
    remedy = "Keep the experts in ND: NPU_GPTOSS_EXPERT_FORMAT=nd. Please report it with `npu-gptoss doctor --json`."
    finding = _all_right(found, 1, remedy)
    # a server looks before it takes this format, and nothing obliges it to
    yield finding if finding.state == "ok" else replace(finding, state="warning")


def graphs(check: str, device: torch.device) -> Iterator[Finding]:
    """Captured work against the definition; in a process of its own, because what waits for ever takes its process
    along."""
    if device.type == "cpu":
        yield not_applicable("A CPU captures no graphs.")
        return
    found = [*graph.outcomes(SMALL if _is_slow(device) else PUBLISHED, device, DTYPE)]
    yield _all_right(found, 1, "Serve with --enforce-eager. Another release of CANN may be right.")
    if device.type != "npu" or importlib.util.find_spec("vllm_ascend") is None:
        return
    from npu_gptoss.serving.ascend.probe import full_graph_objection

    heads, kv_heads = (8, 1) if _is_slow(device) else (64, 8)
    objection = full_graph_objection(
        heads=heads, kv_heads=kv_heads, head_dim=HEAD_DIM, window=WINDOW, dtype=DTYPE, device=device
    )
    if objection is None:
        yield ok("Attention captured short follows its updates to long contexts and back.")
    else:
        yield warning(
            f"Attention captured short does not follow its updates: {objection}.",
            "Servers see it at their start and capture PIECEWISE graphs instead of FULL_DECODE_ONLY ones.",
        )


def _all_right(found: Iterable[Outcome], repeats: int, remedy: str) -> Finding:
    found = list(found)
    wrong = [outcome for outcome in found if outcome.problem]
    if wrong:
        what = f"{len(wrong)} of {len(found)} calls are wrong."
        return failed(what, remedy, details=tuple(outcome.sentence() for outcome in wrong))
    worst = max((outcome.deviation for outcome in found), default=0.0)
    often = f", {repeats} times each" if repeats > 1 else ""
    return ok(f"{len(found)} calls at edges of CANN's kernels{often}: {worst:.2%} from the definition.")


# What each self-test does, and the variable that tells whether a kernel is to blame
CASES: dict[str, tuple[Callable[[str, torch.device], Iterator[Finding]], str]] = {
    "self-test-sink": (quick, _ATTENTION),
    "self-test-window": (quick, _ATTENTION),
    "self-test-attention": (attention_calls, _ATTENTION),
    "self-test-bias": (quick, _EXPERTS),
    "self-test-activation": (quick, _EXPERTS),
    "self-test-moe": (moe, _EXPERTS),
    "self-test-dense": (around, ""),
    "self-test-nz": (nz, _EXPERTS),
    "self-test-graph": (graphs, ""),
}
ALONE = ("self-test-nz", "self-test-graph")  # each in a process of its own


def self_test(check: str, device: torch.device) -> Iterator[Finding]:
    """One of CASES, in bfloat16. What a kernel or the device raises is a finding about them, not about this test."""
    function, override = CASES[check]
    try:
        with torch.inference_mode():  # as a server calls them: torch_npu has other kernels for some operators otherwise
            found = list(function(check, device))
    except Exception as error:  # an operator's refusal, a driver's error
        to_blame = f" {override} tells whether the kernel is to blame." if override else ""
        found = [
            failed(
                f"It could not be computed on {device}: {type(error).__name__}: {one_line(error)}",
                f"Mend what the checks of versions and CANN say.{to_blame}",
            )
        ]
    yield from found
