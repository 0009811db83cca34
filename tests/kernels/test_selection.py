from __future__ import annotations

import logging

import pytest

from npu_gptoss.kernels.platform import Capability, Platform
from npu_gptoss.kernels.registry import ANY, Priority, Range, define_operation, register_kernel
from npu_gptoss.kernels.selection import KernelError, bind, explain, select_kernel, selected_kernels
from npu_gptoss.kernels.signature import accepts, signature
from tests.kernels.toy import CALL, kernel, select
from tests.refused import refused


def test_highest_priority_that_can_run_is_selected(operation):
    kernel("slow")
    kernel("fast", priority=8, size=frozenset({128}))
    kernel("npu", priority=12, capability=Capability.of("ascend"))
    assert select(operation)(x=0) == "slow"
    assert select(operation, size=128)(x=0) == "fast"
    assert select(operation, kind="ascend")(x=0) == "npu"


def test_refusal_lists_every_kernel_with_every_reason(operation):
    kernel("fast", priority=8, x="float32", size=frozenset({128}), capability=Capability.of("cuda"))
    with pytest.raises(KernelError) as error:
        select(operation)
    text = str(error.value)
    for part in ("runs on cuda; this is cpu", "needs float32 x, got bfloat16", "handles size 128, got 64"):
        assert part in text


def test_one_fitting_signature_is_enough_else_the_nearest_explains(operation):
    pair = define_operation("toy", "pair", roles=("a", "b"), traits=(), summary="two tensors")
    both = tuple(accepts(a=dtype, b=dtype) for dtype in ("float32", "bfloat16", "float16"))
    register_kernel(pair, solution="one", signatures=both, traits={}, priority=4)(lambda a, b: None)

    def reasons(a, b):
        return explain(pair, signature(a=a, b=b), {}, platform=Platform("cpu")).candidates[0].reasons

    assert reasons("bfloat16", "bfloat16") == ()
    assert reasons("int8", "bfloat16") == ("needs bfloat16 a, got int8",)


def test_argument_beats_environment(operation, monkeypatch):
    for name in ("a", "b", "c"):
        kernel(name, priority=ord(name) - ord("a") + 4)
    assert select(operation).kernel.solution == "c"
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_TOY_ADD", "a")
    assert select(operation).kernel.solution == "a"
    assert select(operation, override="toy.add.b").kernel.solution == "b"
    assert select(operation, override="").kernel.solution == "c"


def test_a_call_that_leaves_a_trait_unsaid_is_refused(operation):
    kernel("slow")
    with refused("rows, size", KernelError):
        select_kernel(operation, CALL, {})
    with refused("sinks", KernelError):
        select_kernel(operation, CALL, {"size": 1, "rows": 1, "sinks": True})
    with refused("y", KernelError):
        select_kernel(operation, signature(x="bfloat16", y="bfloat16"), {"size": 1, "rows": 1})
    with refused("x", KernelError):
        select_kernel(operation, signature(), {"size": 1, "rows": 1})


def test_automatic_choice_logs_one_line_once(operation, caplog):
    kernel("slow")
    with caplog.at_level(logging.INFO, logger="npu_gptoss"):
        for _ in range(3):
            select(operation, size=77)
    assert [r.getMessage() for r in caplog.records] == ["toy.add runs toy.add.slow for x bfloat16"]


def test_falling_to_the_reference_is_a_warning_with_reasons(operation, caplog):
    kernel("reference", priority=0)
    kernel("fast", priority=8, capability=Capability.of("cuda"))
    with caplog.at_level(logging.WARNING, logger="npu_gptoss"):
        select(operation)
    assert "runs on cuda; this is cpu" in caplog.text


def test_a_reference_that_was_asked_for_is_no_warning(operation, caplog):
    kernel("reference", priority=0)
    with caplog.at_level(logging.WARNING, logger="npu_gptoss"):
        select(operation, override="reference")
    assert not caplog.records


def test_explain_lists_selected_possible_and_refused(operation):
    kernel("reference", priority=0)
    kernel("slow")
    kernel("npu", priority=12, capability=Capability.of("ascend"))
    lines = explain(operation, CALL, {"size": 64, "rows": 1}, platform=Platform("cpu")).lines()
    assert lines == [
        "toy.add on cpu for x bfloat16; rows=1, size=64",
        "  toy.add.npu (priority 12): no: runs on ascend; this is cpu",
        "  toy.add.slow (priority 4): selected",
        "  toy.add.reference (priority 0): could run",
    ]


def test_explain_names_the_override_and_an_empty_choice(operation):
    assert explain(operation, CALL, {"size": 64, "rows": 1}, platform=Platform("cpu")).lines() == [
        "toy.add on cpu for x bfloat16; rows=1, size=64",
        "  no kernel is registered",
    ]
    kernel("slow")
    kernel("fast", priority=8)
    assert explain(operation, CALL, {"size": 64, "rows": 1}, platform=Platform("cpu"), override="slow").lines() == [
        "toy.add on cpu for x bfloat16; rows=1, size=64",
        "  override: slow",
        "  toy.add.fast (priority 8): could run",
        "  toy.add.slow (priority 4): selected",
    ]


def test_selection_list_has_no_duplicates_and_no_outdated_choices(operation):
    kernel("slow")
    select(operation)
    kernel("fast", priority=8, size=frozenset({128}))
    for size in (128, 64, 128):
        select(operation, size=size)
    assert selected_kernels() == (("toy.add", "toy.add.fast", "fast"), ("toy.add", "toy.add.slow", "slow"))
    kernel("faster", priority=12)
    assert selected_kernels() == ()


def test_a_kernel_that_a_self_test_forces_is_not_reported(operation, monkeypatch):
    kernel("reference", priority=Priority.REFERENCE)
    kernel("fast", priority=8)
    select(operation)
    select(operation, override="reference")
    assert selected_kernels() == (("toy.add", "toy.add.fast", "fast"),)
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_TOY_ADD", "reference")
    select(operation)
    assert ("toy.add", "toy.add.reference", "reference") in selected_kernels(), "the user's own choice serves"


def described(rows):
    return CALL, {"size": 64, "rows": rows}


def ranges(bound):
    return [(most, run.kernel.solution) for most, run in bound.ranges]


def test_a_size_is_handled_up_to_both_ends_of_its_range(operation):
    kernel("slow")
    kernel("batch", priority=8, rows=Range(2, 32))
    assert [select(operation, rows=rows).kernel.solution for rows in (1, 2, 32, 33)] == [
        "slow",
        "batch",
        "batch",
        "slow",
    ]
    explanation = explain(operation, CALL, {"size": 64, "rows": 33}, platform=Platform("cpu"))
    assert explanation.candidates[0].reasons == ("handles rows 2 to 32, got 33",)


def test_bound_layer_selects_like_a_single_call_at_every_size(operation):
    kernel("any")
    kernel("one", priority=12, rows=Range(most=1))
    kernel("few", priority=8, rows=Range(most=48))
    kernel("many", priority=8, rows=Range(257))
    bound = bind(operation, described)
    assert ranges(bound)[:-1] == [(1, "one"), (48, "few"), (256, "any")]
    for rows in (0, 1, 2, 48, 49, 256, 257, 1 << 20):
        assert bound.of(rows).kernel is select_kernel(operation, *described(rows)).kernel


def test_a_size_that_follows_from_another_bounds_a_range_too(operation):
    kernel("any")
    kernel("large", priority=8, size=Range(4096))
    bound = bind(operation, lambda rows: (CALL, {"size": rows * 32, "rows": rows}))
    assert ranges(bound)[0] == (127, "any")
    assert bound.of(128).kernel.solution == "large"


def test_override_counts_where_it_can_run_and_raises_if_nowhere(operation, monkeypatch):
    kernel("any")
    kernel("fast", priority=8)
    kernel("few", rows=Range(2, 48))
    kernel("npu", capability=Capability.of("ascend"))
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_TOY_ADD", "few")
    assert [name for _, name in ranges(bind(operation, described))] == ["fast", "few", "fast"]
    assert [name for _, name in ranges(bind(operation, described, "any"))] == ["any"]
    for wrong, says in (("npu", "runs on ascend"), ("onn", "names no kernel")):
        with pytest.raises(KernelError, match=says):
            bind(operation, described, wrong)


def test_a_combination_that_needs_a_feature_is_not_there_without_it(operation):
    signatures = (accepts(x="bfloat16"), accepts(x="float32", needs=("emulated_fp32",)))
    register_kernel(operation, solution="npu", signatures=signatures, traits={"size": ANY}, priority=4)(len)

    def reasons(*features):
        traits = {"size": 1, "rows": 1}
        platform = Platform("cpu", frozenset(features))
        return explain(operation, signature(x="float32"), traits, platform=platform).candidates[0].reasons

    assert reasons("emulated_fp32") == ()
    assert reasons() == ("needs bfloat16 x, got float32",)
