"""The self-test passes with right kernels, and each classic mistake in a kernel makes it fail and is named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_gptoss.attention import ascend as ascend_attention
from npu_gptoss.attention import small_ops as small_attention
from npu_gptoss.attention.reference import paged_attention as right_attention
from npu_gptoss.attention.window import keys_before
from npu_gptoss.doctor import selftest
from npu_gptoss.doctor.selftest import ALONE, CASES, LIMITS, self_test
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Priority, loading, platform_override, register_kernel
from npu_gptoss.kernels.registry import ANY, registry
from npu_gptoss.moe import ascend as ascend_experts
from npu_gptoss.moe import small_ops as small_experts
from npu_gptoss.moe.activation import swigluoai, swigluoai_halves
from npu_gptoss.moe.reference import expert_mlp as right_experts
from tests import ascend_ops
from tests.doctor.machines import only

CPU, BF16 = torch.device("cpu"), torch.bfloat16
ON_CPU = [check for check in CASES if check not in ALONE]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The mutants are gone after each test; on a CPU, whatever machine runs the tests."""
    monkeypatch.setattr(loading, "_plugins_loaded", True)
    monkeypatch.setattr(registry, "kernels", dict(registry.kernels))
    registry.generation += 1
    with platform_override("cpu", frozenset()):
        yield
    registry.generation += 1


def select(family: str, mode: str, function: Callable[..., Any]) -> None:
    """Registers a kernel that is selected before all of ours."""
    model = registry.kernels[f"{family}.{mode}.reference"]
    register_kernel(
        family,
        mode,
        solution="mutant",
        signatures=model.signatures,
        traits=dict.fromkeys(model.traits, ANY),
        priority=Priority.SPECIALISED + 3,
    )(function)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("check", ON_CPU)
def test_right_kernels_pass_with_room_to_spare(check, dtype):
    finding = only(self_test(check, CPU, dtype), "ok")
    deviation = float(finding.sentence.partition("%")[0].rpartition(" ")[2]) / 100
    assert deviation < LIMITS[dtype] / 2


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5"])
def test_the_fused_operators_pass_within_their_contract(cann):
    with ascend_ops.ascend(cann) as calls:
        for check in ON_CPU:
            only(self_test(check, CPU, BF16), "ok")
    used = {name for name, _ in calls}
    assert used >= {"npu_fused_infer_attention_score_v2.out", "_npu_reshape_and_cache", "npu_grouped_matmul"}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here; make test-cuda runs it on one")
def test_the_kernels_of_a_gpu_pass():
    with platform_override("cuda"):
        for check in CASES:
            only(self_test(check, torch.device("cuda"), BF16), "not applicable" if check == "self-test-nz" else "ok")


def attention(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    def mutant(**call: Any) -> None:
        """A mistake."""
        right_attention(**{**call, **change(call)})

    select("attention", "paged", mutant)


def test_a_dropped_sink_fails_and_is_named():
    attention(lambda call: {"sinks": torch.full_like(call["sinks"], float("-inf"))})
    only(self_test("self-test-sink", CPU, BF16), "failed", "the sinks are dropped", "KERNEL_ATTENTION_PAGED=small_ops")


def test_a_scaled_sink_fails_and_is_named():
    attention(lambda call: {"sinks": call["sinks"] * call["scale"]})
    only(self_test("self-test-sink", CPU, BF16), "failed", "the sinks are scaled like scores")


def test_a_sink_of_another_head_fails():
    attention(lambda call: {"sinks": call["sinks"].flip(0)})
    only(self_test("self-test-sink", CPU, BF16), "failed", "from the definition")


def shifted(by: int) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda call: {"sliding_window": call["sliding_window"] and call["sliding_window"] + by}


def test_a_window_of_127_fails():
    attention(shifted(-1))
    only(self_test("self-test-window", CPU, BF16), "failed", "127 positions before the query is not seen")


def test_a_window_of_129_fails():
    attention(shifted(1))
    only(self_test("self-test-window", CPU, BF16), "failed", "128 positions before the query is seen", "pre_tokens")


def test_no_window_fails():
    attention(lambda call: {"sliding_window": None})
    only(self_test("self-test-window", CPU, BF16), "failed", "128 positions before the query is seen")


def test_a_window_that_is_wrong_in_long_chunks_only_fails():
    """As masks cut at the window were upstream: right in decode steps, wrong when a chunk is long."""
    attention(lambda call: shifted(1)(call) if call["query"].shape[0] > 1024 and call["sliding_window"] else {})
    only(self_test("self-test-window", CPU, BF16), "failed")

    def long_only(**call: Any) -> None:
        """A mistake in the long request, none in the others."""
        right_attention(**call)
        wrong = torch.empty_like(call["out"])
        right_attention(**{**call, "out": wrong, **shifted(1)(call)})
        call["out"][2:] = wrong[2:]

    del registry.kernels["attention.paged.mutant"]
    select("attention", "paged", long_only)
    only(self_test("self-test-window", CPU, BF16), "failed", "from the definition")


def test_a_full_layer_with_a_window_fails():
    attention(lambda call: {"sliding_window": call["sliding_window"] or 128})
    only(self_test("self-test-window", CPU, BF16), "failed", "A full layer does not see a key 300 back")


@pytest.mark.parametrize("module", [small_attention, ascend_attention], ids=["small_ops", "ascend"])
@pytest.mark.parametrize(("by", "phrase"), [(-1, "is not seen"), (1, "is seen")])
def test_a_wrong_window_in_our_own_kernels_fails(module, by, phrase, monkeypatch):
    monkeypatch.setattr(module, "keys_before", lambda window: window and keys_before(window) + by)
    if module is small_attention:
        only(self_test("self-test-window", CPU, BF16), "failed", phrase)
    else:
        with ascend_ops.ascend():
            only(self_test("self-test-window", CPU, BF16), "failed", phrase)


def experts(change: Callable[[Any], dict[str, torch.Tensor]]) -> None:
    def mutant(hidden_states, weights, topk_weights, topk_ids, swiglu_limit):
        """A mistake."""
        return right_experts(hidden_states, replace(weights, **change(weights)), topk_weights, topk_ids, swiglu_limit)

    select("moe", "experts", mutant)


def test_an_omitted_bias_fails_and_is_named():
    experts(lambda w: {"gate_up_proj_bias": torch.zeros_like(w.gate_up_proj_bias)})
    only(
        self_test("self-test-bias", CPU, BF16), "failed", "the bias of gate and up is omitted", "MOE_EXPERTS=small_ops"
    )
    del registry.kernels["moe.experts.mutant"]
    experts(lambda w: {"down_proj_bias": torch.zeros_like(w.down_proj_bias)})
    only(self_test("self-test-bias", CPU, BF16), "failed", "the bias of down is omitted")
    del registry.kernels["moe.experts.mutant"]
    names = ("gate_up_proj_bias", "down_proj_bias")
    experts(lambda w: {name: torch.zeros_like(getattr(w, name)) for name in names})
    only(self_test("self-test-bias", CPU, BF16), "failed", "both biases are omitted")


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    return torch.stack([tensor[..., 1::2], tensor[..., 0::2]], dim=-1).flatten(-2)


def test_swapped_gate_and_up_fail_and_are_named():
    experts(lambda w: {n: swapped(getattr(w, n)) for n in ("gate_up_proj", "gate_up_proj_bias")})
    only(self_test("self-test-activation", CPU, BF16), "failed", "gate and up are swapped")


def test_halves_taken_for_interleaved_columns_fail_and_are_named(monkeypatch):
    monkeypatch.setattr(small_experts, "swigluoai", lambda x, limit: swigluoai_halves(*x.chunk(2, -1), limit))
    only(self_test("self-test-activation", CPU, BF16), "failed", "taken for halves, not interleaved")


def test_a_clamp_that_is_left_out_fails_and_is_named(monkeypatch):
    monkeypatch.setattr(small_experts, "swigluoai", lambda x, limit: swigluoai(x, 1e30))
    only(self_test("self-test-activation", CPU, BF16), "failed", "the clamp is left out")


def test_the_plain_swiglu_fails(monkeypatch):
    """The bug that garbled three upstream releases."""

    def plain(x: torch.Tensor, limit: float) -> torch.Tensor:
        return torch.nn.functional.silu(x[..., 0::2]) * x[..., 1::2]

    monkeypatch.setattr(small_experts, "swigluoai", plain)
    for check in ("self-test-bias", "self-test-activation"):
        only(self_test(check, CPU, BF16), "failed", "from the definition")


def test_mistakes_in_the_ascend_experts_fail(monkeypatch):
    prepare = ascend_experts.prepare
    specs = {name: kernel for name, kernel in registry.kernels.items() if name == "moe.experts.ascend"}

    def with_prepare(change: Callable[[Any], dict[str, Any]]) -> None:
        for name, kernel in specs.items():
            registry.kernels[name] = replace(
                kernel, prepare=lambda w, limit: (lambda p: replace(p, **change(p)))(prepare(w, limit))
            )
        registry.generation += 1

    mutants = {
        "self-test-bias": lambda p: {"gate_up_proj_bias": p.gate_up_proj_bias * 0},
        "self-test-activation": lambda p: {"lower": p.lower - 1e30, "upper": p.upper + 1e30},
    }
    for check, change in mutants.items():
        with_prepare(change)
        with ascend_ops.ascend():
            only(self_test(check, CPU, BF16), "failed", "omitted" if check == "self-test-bias" else "left out")


def test_routing_over_all_experts_fails():
    def mutant(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights that do not sum to one."""
        return torch.softmax(logits.float(), -1).topk(top_k)

    select("moe", "route", mutant)
    only(self_test("self-test-bias", CPU, BF16), "failed", "from the definition")


def test_keys_that_are_written_to_another_slot_fail():
    right = registry.kernels["attention.write_kv.reference"].function

    def mutant(key, value, key_cache, value_cache, slot_mapping):
        """One slot too far."""
        right(key, value, key_cache, value_cache, (slot_mapping + 1) % key_cache.shape[0] * key_cache.shape[1])

    select("attention", "write_kv", mutant)
    only(self_test("self-test-sink", CPU, BF16), "failed")


def test_nan_is_a_failure():
    def mutant(**call: Any) -> None:
        """NaN in one place."""
        right_attention(**call)
        call["out"].view(-1)[7] = float("nan")

    select("attention", "paged", mutant)
    only(self_test("self-test-sink", CPU, BF16), "failed", "NaN or Inf")


def test_a_kernel_that_raises_is_a_failure_with_its_words():
    def mutant(**call: Any) -> None:
        """A refusal."""
        raise RuntimeError("call aclnnFusedInferAttentionScoreV4 failed,\n error code is 561002")

    select("attention", "paged", mutant)
    only(self_test("self-test-sink", CPU, BF16), "failed", "could not be computed", "failed, error code is 561002")


def test_every_named_mistake_is_far_from_rounding():
    """Five times the limit at least, so that neither can be taken for the other."""
    seen: dict[str, float] = {}

    def judged(check, what, got, want, suspects, dtype, override):
        seen.update({name: selftest.deviation(tensor, want) for name, tensor in suspects.items()})
        return SimpleNamespace(state="ok")

    original = selftest._judged
    selftest._judged = judged
    try:
        for check in ON_CPU:
            list(CASES[check](CPU, BF16))
    finally:
        selftest._judged = original
    assert len(seen) == 11
    assert {name: size for name, size in seen.items() if size < 5 * LIMITS[BF16]} == {}


def test_an_override_that_cannot_run_is_told_as_such(monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_ATTENTION_PAGED", "ascend")
    finding = only(self_test("self-test-sink", CPU, BF16), "failed", "the override 'ascend'")
    assert InputError.__name__ not in finding.sentence


@pytest.mark.parametrize("check", ALONE)
def test_a_cpu_has_no_formats_and_no_graphs(check):
    only(self_test(check, CPU, BF16), "not applicable")


@pytest.mark.parametrize(
    ("defect", "check", "remedy"),
    [
        ("merged-heads", "attention", "goes round it by itself"),
        ("window-race", "attention", "do not serve with it"),
        ("stale-counts", "moe", "NPU_GPTOSS_KERNEL_MOE_EXPERTS=small_ops"),
    ],
)
def test_a_known_defect_of_cann_is_named_with_its_source(defect, check, remedy):
    with ascend_ops.ascend(defects=frozenset({defect})):
        (finding,) = self_test(f"self-test-{check}", CPU, BF16)
    assert finding.state == "failed"
    assert remedy in finding.remedy
    assert any("ops-transformer" in detail for detail in finding.details)


def test_a_defect_of_narrow_norms_is_a_warning_because_gpt_oss_is_wider():
    with ascend_ops.ascend(defects=frozenset({"narrow-norm"})):
        wide, narrow = self_test("self-test-dense", CPU, BF16)
    assert (wide.state, narrow.state) == ("ok", "warning")
    assert any("cf84e2226" in detail for detail in narrow.details)
