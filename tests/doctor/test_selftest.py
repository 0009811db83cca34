"""The self-test passes with right kernels; each classic mistake in a kernel makes it fail and is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from npu_gptoss.attention.reference import paged_attention as right_attention
from npu_gptoss.doctor import selftest
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.doctor.selftest import CASES, PREFIX, self_test
from npu_gptoss.kernels import Priority, platform_override, register_kernel
from npu_gptoss.kernels.registry import ANY, registry
from npu_gptoss.moe.reference import expert_mlp as right_experts
from npu_gptoss.verify.checks import CHECKS
from npu_gptoss.verify.compare import compare
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test import classic
from npu_gptoss.verify.self_test.all import ALONE
from tests import ascend_ops
from tests.doctor.machines import only
from tests.kernels.conftest import own_registry  # noqa: F401

CPU = torch.device("cpu")
PAGED, EXPERTS = "attention.paged", "moe.experts"
ON_CPU = [check for check in CASES if check.removeprefix(PREFIX) not in ALONE]


@pytest.fixture(autouse=True)
def as_on_a_cpu(own_registry: None) -> Any:  # noqa: F811
    """The mutants are gone after each test; tests run as on a CPU, on any machine."""
    with platform_override("cpu", frozenset()):
        yield


def select(operation: str, function: Callable[..., Any]) -> None:
    """Registers a kernel that is selected before all of ours."""
    model = registry.kernels[f"{operation}.reference"]
    register_kernel(
        registry.operations[operation],
        solution="mutant",
        signatures=model.signatures,
        traits=dict.fromkeys(model.traits, ANY),
        priority=Priority.SPECIALISED + 3,
    )(function)


@pytest.mark.parametrize("check", ON_CPU)
def test_right_kernels_pass_with_room_to_spare(check):
    finding = only(self_test(check, CPU), "ok")
    assert float(re.search(r"at worst (\S+) of the tolerance", finding.sentence)[1]) < 0.5


@pytest.mark.cuda
def test_the_kernels_of_a_gpu_pass():
    with platform_override("cuda"):
        for check in CASES:
            only(self_test(check, torch.device("cuda")), "not applicable" if check == "self-test-nz" else "ok")


def attention(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[..., None]:
    return lambda **call: right_attention(**{**call, **change(call)})


def shifted(call: dict[str, Any]) -> dict[str, Any]:
    return {"sliding_window": call["sliding_window"] and call["sliding_window"] + 1}


def long_only(**call: Any) -> None:
    """As masks cut at the window were upstream: right in decode steps, wrong when a chunk is long."""
    right_attention(**call)
    wrong = torch.empty_like(call["out"])
    right_attention(**{**call, "out": wrong, **shifted(call)})
    call["out"][2:] = wrong[2:]


def experts(*names: str) -> Callable[..., torch.Tensor]:
    """Without these weights."""

    def mutant(hidden_states, weights, topk_weights, topk_ids, swiglu_limit):
        changed = replace(weights, **{name: torch.zeros_like(getattr(weights, name)) for name in names})
        return right_experts(hidden_states, changed, topk_weights, topk_ids, swiglu_limit)

    return mutant


def over_all_experts(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights that do not sum to one."""
    return torch.softmax(logits.float(), -1).topk(top_k)


def one_slot_too_far(key, value, key_cache, value_cache, slot_mapping):
    """Keys of the neighbour."""
    right = registry.kernels["attention.write_kv.reference"].function
    right(key, value, key_cache, value_cache, (slot_mapping + 1) % key_cache.shape[0] * key_cache.shape[1])


BY_PLAIN_OPERATORS = {"attention.paged": "KERNEL_ATTENTION_PAGED=small_ops", "moe.experts": "MOE_EXPERTS=small_ops"}


@pytest.mark.parametrize(
    ("operation", "mutant", "check", "named"),
    [
        (PAGED, attention(lambda call: {"sinks": call["sinks"] - torch.inf}), "sink", "sink dropped"),
        (PAGED, attention(shifted), "window", "window 129 for 128"),
        (PAGED, attention(lambda call: {"sliding_window": 128}), "window", "window on a layer that sees all"),
        (PAGED, long_only, "window", "from the definition"),
        (EXPERTS, experts("down_proj_bias"), "bias", "down bias dropped"),
        (EXPERTS, experts("gate_up_proj_bias", "down_proj_bias"), "bias", "from the definition"),
        ("moe.route", over_all_experts, "bias", "from the definition"),
        ("attention.write_kv", one_slot_too_far, "sink", ""),
    ],
    ids=["sink", "129 keys", "a full layer", "long chunks", "bias", "both biases", "softmax", "slot"],
)
def test_a_mistake_in_a_kernel_fails_and_is_named(operation, mutant, check, named, monkeypatch):
    """`test_each_classic_mutation_is_far_from_rounding` has the others."""
    if mutant is long_only:  # no mutation explains it, and trying all takes long
        monkeypatch.setattr(classic, "explained", lambda *_: "")
    select(operation, mutant)
    only(self_test(f"self-test-{check}", CPU), "failed", named, BY_PLAIN_OPERATORS.get(operation, ""))


@pytest.mark.parametrize(
    ("check", "words", "count"),
    [
        ("self-test-sink", ("sink",), 5),
        ("self-test-window", ("window",), 4),
        ("self-test-bias", ("bias",), 5),
        ("self-test-activation", ("swapped", "halves", "clamp", "one added", "SwiGLU"), 5),
    ],
)
def test_each_classic_mutation_is_far_from_rounding(check, words, count):
    """Five times the limit at least, so that a mistake cannot be confused with rounding."""
    name = check.removeprefix(PREFIX)
    paged = name in classic.STEPS
    definition = CHECKS["attention.paged" if paged else "moe.experts"]
    mutations = [each for each in definition.mutations if any(word in each.name for word in words)]
    sizes = dict.fromkeys((each.name for each in mutations), 0.0)
    for inputs, _ in (classic.attention if paged else classic.experts)(name, Rank(CPU)):
        want = definition.definition(inputs)
        for mutation in mutations:
            if (wrong := mutation.answer(inputs, definition.definition)) is not None:
                error = compare(wrong, want, classic.LIMITS).error
                sizes[mutation.name] = max(sizes[mutation.name], error)
    assert len(sizes) == count
    assert {name: size for name, size in sizes.items() if size < 5} == {}


@pytest.mark.parametrize("check", sorted(PREFIX + name for name in ALONE))
def test_a_cpu_has_no_formats_and_no_graphs(check):
    only(self_test(check, CPU), "not applicable")


@pytest.mark.parametrize(
    ("defect", "check", "remedy"),
    [
        ("merged-heads", "attention", "works around it"),
        ("window-race", "attention", "do not serve with it"),
        ("stale-counts", "moe", "NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops"),
    ],
)
def test_a_known_defect_of_cann_is_named_with_its_source(defect, check, remedy):
    with ascend_ops.ascend(defects=frozenset({defect})):
        (finding,) = self_test(f"self-test-{check}", CPU)
    assert finding.state == "failed"
    assert remedy in finding.remedy
    assert any("ops-transformer" in detail for detail in finding.details)


def test_a_defect_of_narrow_norms_is_a_warning_because_gpt_oss_is_wider():
    with ascend_ops.ascend(defects=frozenset({"narrow-norm"})):
        wide, narrow = self_test("self-test-dense", CPU)
    assert (wide.state, narrow.state) == ("ok", "warning")
    assert any("cf84e2226" in detail for detail in narrow.details)


CARD = Device("npu", "Ascend910B3", 1, 64 * GIB, 60 * GIB)


def test_bandwidth_is_reported_with_its_share_of_nominal():
    only([selftest.judged(1357.4, 1600, CARD)], "ok", "1357 GB/s, 85% of the nominal 1600 GB/s")
    only([selftest.judged(799.0, 1600, CARD)], "warning", "50% of the nominal", "npu-smi info")
    only([selftest.judged(900.0, None, CARD)], "ok", "its nominal bandwidth is not known")


def test_on_a_cpu_there_is_just_the_number():
    host = Device("cpu", "Kunpeng", 64, 256 * GIB, 8 << 20)
    finding = only(selftest.bandwidth(torch.device("cpu"), host), "ok", "memory of Kunpeng moves", "thread(s)")
    assert float(finding.sentence.split(" GB/s")[0].split()[-1]) > 0


def test_the_emulated_device_is_not_measured():
    emulated = Device("npu", "Ascend910B3", 1, 4 * GIB, 4 * GIB, emulated=True)
    only(selftest.bandwidth(torch.device("cpu"), emulated), "not applicable", "says nothing of a 910B")
