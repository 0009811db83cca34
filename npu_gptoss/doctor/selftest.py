"""The self-tests of `npu_gptoss.verify` as findings: ten seconds of calls with the kernels that would serve.

And the speed of the device's memory: a decode step reads the weights of its experts once, so this bounds its speed.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

import torch

from npu_gptoss.bench.measure import copy_bandwidth
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, one_line, warning
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.nominal import memory_bandwidth
from npu_gptoss.verify.attention_cases import WINDOW
from npu_gptoss.verify.compare import Result
from npu_gptoss.verify.rank import Rank, is_slow, whole
from npu_gptoss.verify.self_test.all import SELF_TESTS, not_here
from npu_gptoss.verify.self_test.attention import HEAD_DIM

PREFIX = "self-test-"  # before the names of SELF_TESTS
WRONG = "Text would be wrong without an error: do not serve with it. "
REPORT = "Please report it with `npu-gptoss doctor --json`."
ATTENTION = f"{WRONG}NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops takes plain torch operators. {REPORT}"
EXPERTS = f"{WRONG}NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops takes plain ones (--enforce-eager on Ascend). {REPORT}"
OTHER_CANN = f"{WRONG}Install another release of CANN. {REPORT}"
ND = f"Keep the experts in ND: NPU_GPTOSS_EXPERT_FORMAT=nd. {REPORT}"
EAGER = "Serve with --enforce-eager. Another release of CANN may be right."
# title, remedy of a wrong result, repeats of a right call on a card
CASES: dict[str, tuple[str, str, int]] = {
    "self-test-sink": ("Attention with sinks", ATTENTION, 1),
    "self-test-window": (f"The window of {WINDOW} keys, and a layer without one", ATTENTION, 1),
    "self-test-attention": ("Attention calls that known defects of CANN get wrong", ATTENTION, 20),
    "self-test-bias": ("Routing and experts with biases", EXPERTS, 1),
    "self-test-activation": ("gpt-oss's activation", EXPERTS, 1),
    "self-test-moe": ("Routing and experts at the edges of their kernels", EXPERTS, 5),
    "self-test-dense": ("Projections and norms", OTHER_CANN, 5),
    "self-test-nz": ("Weights in FRACTAL_NZ", ND, 1),
    "self-test-graph": ("Routing and experts in a graph", EAGER, 1),
}


def self_test(check: str, device: torch.device) -> Iterator[Finding]:
    """The findings of one of CASES, in bfloat16. An exception outside of its calls is a finding too."""
    name = check.removeprefix(PREFIX)
    if reason := not_here(name, device):
        yield not_applicable(f"{reason[0].upper()}{reason[1:]}.")
        return
    title, remedy, repeats = CASES[check]
    # on a CPU and on the emulated 910B the long attention calls take too long for ten seconds
    rank = replace(whole(device, repeats), short=name == "attention" and is_slow(device))
    try:
        with torch.inference_mode():  # as a server: torch_npu has other kernels for some operators otherwise
            found = list(SELF_TESTS[name](rank))
            more = list(_more(name, rank))
    except Exception as error:  # an operator's refusal, a driver's error
        yield failed(f"{title} cannot be computed on {device}: {type(error).__name__}: {one_line(error)}", remedy)
        return
    if wrong := [result for result in found if result.wrong]:
        if all(result.merged_heads for result in wrong):
            remedy = "A server works around it and says so in its log. A newer CANN may have it repaired."
        finding = failed(f"{title}: {_words(found)}", remedy, details=_sentences(wrong))
        # a server tries this format before it takes it, and nothing needs it
        yield replace(finding, state="warning") if name == "nz" else finding
    else:
        often = f", {rank.repeats} times each" if rank.repeats > 1 else ""
        yield ok(f"{title}: {_words(found)}{often}.")
    yield from more


def _words(found: list[Result]) -> str:
    if wrong := [result for result in found if result.wrong]:
        return f"{len(wrong)} of {len(found)} calls are wrong." if wrong[0].suspect else f"{wrong[0].lines[0]}."
    worst = max(result.error for result in found)
    calls = "1 call" if len(found) == 1 else f"{len(found)} calls"
    return f"{calls} as the definition, at worst {worst:.2g} of the tolerance"


def _sentences(wrong: list[Result]) -> tuple[str, ...]:
    return tuple(result.sentence() for result in wrong if result.suspect)


def _more(name: str, rank: Rank) -> Iterator[Finding]:
    """Findings that only warn: norms narrower than gpt-oss's, and graphs of attention."""
    if name == "dense":
        if narrow := [result for result in SELF_TESTS["narrow-norm"](rank) if result.wrong]:
            yield warning(
                "Norms up to 2000 wide are wrong on this card; gpt-oss's are 2880 wide, a tiny checkpoint's are not.",
                "Serve no tiny checkpoint on this CANN; CANN 9.0.0 has it repaired.",
                details=_sentences(narrow),
            )
    elif name == "graph" and rank.device.type == "npu" and importlib.util.find_spec("vllm_ascend") is not None:
        from npu_gptoss.serving.ascend.probe import full_graph_objection

        sizes = {"heads": rank.heads, "kv_heads": rank.kv_heads, "head_dim": HEAD_DIM, "window": WINDOW}
        objection = full_graph_objection(**sizes, dtype=rank.dtype, device=rank.device)
        if objection is None:
            yield ok("Attention captured short follows its updates to long contexts and back.")
        else:
            remedy = "A server checks this at its start and captures PIECEWISE graphs instead of FULL_DECODE_ONLY ones."
            yield warning(f"Attention captured short does not follow its updates: {objection}.", remedy)


# --- the bandwidth of the memory

LOW = 0.5  # of nominal: below, something is wrong. A copy reaches 0.8 to 0.9 where nothing is.


def bandwidth(device: torch.device, seen: Device) -> Finding:
    if seen.emulated:
        return not_applicable("The emulated device's memory is this host's: its speed says nothing of a 910B.")
    size = min((256 << 20) if device.type == "cpu" else GIB, seen.free // 8)
    speed = copy_bandwidth(torch.ones(max(1 << 20, size) // 4, device=device)) / 1e9
    return judged(speed, memory_bandwidth(seen.name), seen)


def judged(speed: float, known: int | None, seen: Device) -> Finding:
    """The finding for a measured speed in GB/s."""
    sentence = f"A copy in the memory of {seen.name} moves {speed:.0f} GB/s"
    if seen.kind == "cpu":
        return ok(f"{sentence}, with {torch.get_num_threads()} thread(s).")
    if known is None:
        return ok(f"{sentence}; its nominal bandwidth is not known here.")
    sentence += f", {speed / known:.0%} of the nominal {known} GB/s"
    if speed < LOW * known:
        remedy = "See whether another process uses the device (`npu-smi info`, `nvidia-smi`), or it is throttled."
        return warning(f"{sentence}.", remedy)
    return ok(f"{sentence}.")
