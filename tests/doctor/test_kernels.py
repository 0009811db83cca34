"""One finding for each operation: what is selected, and why not the others."""

from __future__ import annotations

import logging

import pytest

from npu_gptoss.doctor.kernels import kernels
from npu_gptoss.kernels import Priority, loading, platform_override
from npu_gptoss.kernels.registry import registry

TORCH_NPU = frozenset({"torch_npu"})


@pytest.fixture(autouse=True)
def no_plugins(monkeypatch):
    monkeypatch.setattr(loading, "_plugins_loaded", True)


def by_operation(platform):
    return {finding.subject: finding for finding in kernels(platform) if finding.subject}


def test_every_operation_has_a_finding_with_the_reasons_against_the_others():
    with platform_override("cpu", frozenset()):
        found = by_operation("cpu")
    assert set(found) == set(registry.operations)
    assert {finding.state for finding in found.values()} == {"ok"}
    paged = found["attention.paged"]
    assert paged.sentence == "attention.paged.small_ops is selected."
    assert "attention.paged.ascend: runs on ascend; this is cpu" in paged.details
    assert "attention.paged.reference: could run, is not selected" in paged.details


def test_on_ascend_the_fused_operators_are_selected():
    with platform_override("ascend", TORCH_NPU):
        found = by_operation("ascend")
    for name in ("attention.paged", "attention.write_kv", "moe.experts", "moe.route"):
        assert found[name].state == "ok"
        assert f"{name}.ascend is selected" in found[name].sentence


def test_plain_operators_where_fused_ones_are_made_for_the_machine_are_a_warning():
    with platform_override("ascend", frozenset()):
        found = by_operation("ascend")
    paged = found["attention.paged"]
    assert paged.state == "warning"
    assert "attention.paged.small_ops is selected and not attention.paged.ascend" in paged.sentence
    assert "attention.paged.ascend: needs torch_npu, which is not installed" in paged.details
    with platform_override("cpu", TORCH_NPU):  # what the variable NPU_GPTOSS_PLATFORM may do
        assert "are selected for cpu" in by_operation("ascend")["moe.experts"].sentence


def test_a_kernel_for_some_shapes_only_is_not_missed_by_the_others():
    with platform_override("cuda", frozenset({"triton"})):
        assert {finding.state for finding in by_operation("cuda").values()} == {"ok"}
    with platform_override("cuda", frozenset()):
        found = by_operation("cuda")
    for name, kernel in ((n, k) for n in found for k in registry.kernels.values() if f"{k.family}.{k.mode}" == n):
        if "cuda" in kernel.capability.platforms and kernel.priority < Priority.SPECIALISED:
            assert found[name].state == "warning", kernel.name


def test_an_override_that_cannot_run_is_a_failure_that_names_its_variable(monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPERTS", "ascend")
    with platform_override("cpu", frozenset()):
        finding = by_operation("cpu")["moe.experts"]
    assert finding.state == "failed"
    assert "by the override 'ascend'" in finding.sentence
    assert finding.remedy == "Unset NPU_GPTOSS_KERNEL_MOE_EXPERTS."


def test_the_slow_definition_is_a_warning(monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_ROUTE", "reference")
    with platform_override("cpu", frozenset()):
        finding = by_operation("cpu")["moe.route"]
    assert finding.state == "warning"
    assert "moe.route.reference is selected, by the override 'reference', the definition" in finding.sentence
    assert finding.remedy == "Unset NPU_GPTOSS_KERNEL_MOE_ROUTE."


def test_third_party_kernels_that_do_not_load_are_a_warning(monkeypatch):
    def complain():
        logging.getLogger("npu_gptoss.kernels.loading").warning("the kernels of plugin %s are not available", "x:y")

    monkeypatch.setattr("npu_gptoss.kernels.load_kernels", complain)
    first = next(kernels("cpu"))
    assert (first.state, first.sentence) == ("warning", "the kernels of plugin x:y are not available")
