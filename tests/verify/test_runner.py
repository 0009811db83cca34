"""Defects that must fail a kernel, each put into a kernel registered here."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch

from npu_gptoss.attention import small_ops
from npu_gptoss.dense import small_ops as dense_small_ops
from npu_gptoss.kernels import ANY, Priority, accepts, define_operation
from npu_gptoss.kernels import register_kernel as register
from npu_gptoss.kernels.registry import registry
from npu_gptoss.moe import small_ops as moe_small_ops
from npu_gptoss.verify import calls
from npu_gptoss.verify.known_failures import KNOWN_FAILURES, KnownFailure
from npu_gptoss.verify.mutations import Mutation
from npu_gptoss.verify.runner import FAILED, KNOWN, PASSED, UNEXPECTED, Report, Target, targets, verify
from tests.kernels.conftest import own_registry  # noqa: F401

CPU = torch.device("cpu")
TRAITS = {"head_dim": ANY, "block_size": ANY, "sliding_window": ANY}


def attention(function: Callable[..., Any], dtype: str = "float32", **traits: Any) -> None:
    register(
        registry.operations["attention.paged"],
        solution="mine",
        signatures=(accepts(query=dtype, kv=dtype, sinks=dtype),),
        traits={**TRAITS, **traits},
        priority=Priority.PORTABLE,
    )(function)


def verified(name: str = "attention.paged.mine", cases: int = 1, **options: Any) -> Report:
    (target,), _ = targets(CPU, name)
    return verify(target, CPU, seed=0, cases=cases, **options)


def without_sinks(*, sinks: torch.Tensor, **rest: Any) -> None:
    small_ops.paged_attention(sinks=torch.full_like(sinks, -1e4), **rest)


def last_row_not_written(*, out: torch.Tensor, **rest: Any) -> None:
    own = torch.empty_like(out)
    small_ops.paged_attention(out=own, **rest)
    out[:-1] = own[:-1]


def raises(**arguments: Any) -> None:
    raise RuntimeError("no such device\nsecond line")


def test_a_right_kernel_passes_in_every_call() -> None:
    attention(small_ops.paged_attention)
    report = verified()
    assert report.ok
    assert {call.state for call in report.calls} == {PASSED}
    assert len(report.calls) > 25


@pytest.mark.parametrize(
    ("kernel", "fewest", "words"),
    [
        (without_sinks, 25, ["values differ", "got ", "expected "]),
        (last_row_not_written, 1, []),  # its buffer holds NaN
        (raises, 25, ["RuntimeError: no such device (raises, line ", "second line"]),
    ],
)
def test_a_wrong_kernel_fails_with_its_differences(kernel: Any, fewest: int, words: list[str]) -> None:
    attention(kernel)
    report = verified()
    assert not report.ok
    wrong = [call for call in report.calls if call.state == FAILED]
    assert len(wrong) >= fewest
    assert all(word in "\n".join(wrong[0].lines) for word in words)


def test_a_kernel_gets_the_calls_that_it_states_and_no_others() -> None:
    seen = set()

    def watched(**arguments: Any) -> None:
        cache = arguments["key_cache"]
        seen.add((cache.dtype, cache.shape[3], cache.shape[1], arguments["sliding_window"] is None))
        small_ops.paged_attention(**arguments)

    attention(
        watched, "bfloat16", head_dim=frozenset({80}), block_size=frozenset({48}), sliding_window=frozenset({True})
    )
    report = verified(cases=5)
    assert report.ok
    assert seen == {(torch.bfloat16, 80, 48, False)}


def test_a_kernel_for_which_no_call_can_be_made_is_not_called_right() -> None:
    attention(small_ops.paged_attention, "float16")
    report = verified()
    assert not report.ok
    assert "no call fits its traits" in report.reasons[0]
    assert "query float16" in report.reasons[0]


def test_an_operation_without_a_check_is_not_called_right() -> None:
    define_operation("toy", "add", roles=("x",), traits=(), summary="adds one")
    register(
        registry.operations["toy.add"], solution="mine", signatures=(accepts(x="float32"),), traits={}, priority=4
    )(len)
    report = verified("toy.add.mine")
    assert not report.ok
    assert report.reasons == ["there is no check of the operation toy.add"]


def test_the_ledger_is_of_one_platform_and_names_kernels_that_exist() -> None:
    assert not KnownFailure("a*", "b*", "ascend", "why").covers("ab", "bc", "cpu")
    assert KnownFailure("a*", "b*", "ascend", "why").covers("ab", "bc", "ascend")
    for entry in KNOWN_FAILURES:
        assert [name for name in registry.kernels if fnmatchcase(name, entry.kernel)], entry
        assert entry.reason


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("attention.paged", ["attention.paged.small_ops"]),
        ("rope", ["rope.rotate", "rope.tables"]),
        ("*.rou*.small_ops", ["dense.router.small_ops", "moe.route.small_ops"]),
    ],
)
def test_a_filter_is_a_part_of_a_name_or_a_pattern(text: str, found: list[str]) -> None:
    assert [target.name for target in targets(CPU, text)[0] if target.origin == "npu_gptoss"] == found


def routing(function: Callable[..., Any], operation: str = "moe.route") -> Target:
    """Registers a routing kernel, or another of logits, with cheap calls."""
    options = {"solution": "mine", "signatures": (accepts(logits="float32"),), "traits": {}, "priority": 4}
    register(registry.operations[operation], **options)(function)
    return targets(CPU, f"{operation}.mine")[0][0]


def test_the_same_seed_makes_the_same_calls_and_another_seed_others() -> None:
    def drawn(seed: int) -> list[float]:
        seen: list[float] = []

        def watched(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(logits.sum().item())
            return moe_small_ops.route(logits, top_k)

        assert verify(routing(watched), CPU, seed=seed, cases=3).ok
        registry.kernels.pop("moe.route.mine")
        return seen

    assert drawn(1) == drawn(1)
    assert drawn(1)[-3:] != drawn(2)[-3:]


def test_a_mutation_that_no_call_shows_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without effect."""
    nothing = Mutation("no mistake at all", ("moe.route",), lambda inputs, definition: definition(inputs))
    monkeypatch.setattr(calls, "mutations_of", lambda check: (nothing,))
    report = verify(routing(moe_small_ops.route), CPU, seed=0, cases=0, mutate=True)
    assert not report.ok
    assert [(m.name, m.shown, m.caught_by) for m in report.mutations] == [("no mistake at all", True, "")]


def test_a_kernel_that_spoils_its_inputs_cannot_spoil_the_definition() -> None:
    """Of the next call, and of the mistakes."""

    def spoils(logits: torch.Tensor, out: torch.Tensor) -> None:
        dense_small_ops.greedy(logits, out)
        logits.zero_()

    assert verify(routing(spoils, "dense.greedy"), CPU, seed=0, cases=1, mutate=True).ok


def test_a_known_failure_does_not_fail_and_an_unexpected_pass_does() -> None:
    ledger = (KnownFailure("moe.*.mine", "*", "cpu", "made without a softmax, for this test"),)

    def report(kernel: Callable[..., Any]) -> tuple[bool, set[str]]:
        found = verify(routing(kernel), CPU, seed=0, cases=1, ledger=ledger)
        del registry.kernels["moe.route.mine"]
        return found.ok, {(call.state, *call.lines) for call in found.calls}

    reason = ledger[0].reason
    assert report(lambda logits, top_k: logits.topk(top_k)) == (True, {(KNOWN, f"known: {reason}")})
    passes = f"it passes now; take it out of the ledger: {reason}"
    assert report(moe_small_ops.route) == (False, {(UNEXPECTED, passes)})
