"""One finding for each operation: the selected kernel, and the reasons against the others."""

from __future__ import annotations

import logging

import pytest

from npu_gptoss.doctor.kernels import kernels
from npu_gptoss.kernels import Priority, loading, platform_override
from npu_gptoss.kernels.registry import registry
from tests.doctor.machines import only

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
    assert any(line.startswith("for other platforms: ") for line in paged.details)
    assert not any("runs on" in line for line in paged.details)
    assert "attention.paged.reference: could run, is not selected" in paged.details


def test_on_ascend_the_fused_operators_are_selected():
    with platform_override("ascend", TORCH_NPU):
        found = by_operation("ascend")
    for name in ("attention.paged", "attention.write_kv", "moe.experts", "moe.route"):
        only(found[name], "ok", f"{name}.ascend is selected")


def test_plain_operators_instead_of_fused_ones_are_a_warning():
    with platform_override("ascend", frozenset()):
        found = by_operation("ascend")
    paged = only(found["attention.paged"], "warning", "paged.small_ops is selected and not attention.paged.ascend")
    assert "attention.paged.ascend: needs torch_npu, which is not installed" in paged.details
    with platform_override("cpu", TORCH_NPU):  # what the variable NPU_GPTOSS_PLATFORM may do
        assert "are selected for cpu" in by_operation("ascend")["moe.experts"].sentence


def test_a_kernel_for_some_shapes_only_is_not_missed_by_the_others():
    with platform_override("cuda", frozenset({"triton"})):
        assert {finding.state for finding in by_operation("cuda").values()} == {"ok"}
    with platform_override("cuda", frozenset()):
        found = by_operation("cuda")
    for name, kernel in ((n, k) for n in found for k in registry.kernels.values() if f"{k.family}.{k.mode}" == n):
        if "cuda" in kernel.capability.platforms and Priority.PERFORMANT <= kernel.priority < Priority.SPECIALISED:
            assert found[name].state == "warning", kernel.name


@pytest.mark.parametrize(
    ("operation", "override", "state", "phrase"),
    [
        ("moe.experts", "ascend", "failed", "by the override 'ascend'"),
        ("moe.route", "reference", "warning", "reference is selected, by the override 'reference', the definition"),
    ],
)
def test_impossible_or_slow_override_is_reported_with_its_variable(monkeypatch, operation, override, state, phrase):
    variable = f"NPU_GPTOSS_KERNEL_{operation.replace('.', '_').upper()}"
    monkeypatch.setenv(variable, override)
    with platform_override("cpu", frozenset()):
        only(by_operation("cpu")[operation], state, phrase, f"Unset {variable}.")


def test_third_party_kernels_that_do_not_load_are_a_warning(monkeypatch):
    def complain():
        logging.getLogger("npu_gptoss.kernels.loading").warning("the kernels of plugin %s are not available", "x:y")

    monkeypatch.setattr("npu_gptoss.kernels.load_kernels", complain)
    first = next(kernels("cpu"))
    only(first, "warning", "the kernels of plugin x:y are not available")
