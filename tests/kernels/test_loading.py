from __future__ import annotations

import logging
import sys
from types import SimpleNamespace

import pytest

from npu_gptoss.kernels import Platform, explain, loading, select_kernel, selected_kernels
from npu_gptoss.kernels.registry import registry
from tests.kernels.toy import CALL, kernel, select


def entry_point(load, name="fast"):
    return SimpleNamespace(
        name=name, value="their_package:register", dist=SimpleNamespace(name="their-package"), load=load
    )


def register(name="theirs"):
    kernel("theirs", name=name, priority=16)


def test_a_plugin_function_is_called_and_its_kernel_wins_by_its_band(operation):
    kernel("ours", priority=15, function=len)
    loading.load_plugin(entry_point(lambda: register))
    found = select(operation)
    assert (found.name, found.kernel.origin) == ("theirs", "their-package:fast")


def test_failing_plugin_is_a_named_warning_and_registers_nothing(operation, caplog):
    def breaks_half_way():
        register()
        raise RuntimeError("no such library")

    with caplog.at_level(logging.WARNING, logger="npu_gptoss"):
        loading.load_plugin(entry_point(lambda: breaks_half_way))
    assert registry.kernels_of(operation) == []
    for part in ("their-package:fast", "their_package:register", "RuntimeError: no such library"):
        assert part in caplog.text


def test_a_plugin_cannot_take_the_name_of_a_kernel_of_ours(operation, caplog):
    kernel("ours", priority=4, function=len)
    with caplog.at_level(logging.WARNING, logger="npu_gptoss"):
        loading.load_plugin(entry_point(lambda: lambda: register(name="toy.add.ours")))
    assert registry.kernels["toy.add.ours"].function is len
    assert "is taken by npu_gptoss" in caplog.text


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin that is not loaded yet."""
    monkeypatch.setattr(loading, "_plugins_loaded", False)
    monkeypatch.setattr(loading, "entry_points", lambda group: [entry_point(lambda: register)])


@pytest.mark.parametrize(("switch", "loaded"), [("1", False), ("0", True)])
def test_the_switch_keeps_third_party_kernels_out(operation, installed, monkeypatch, switch, loaded):
    monkeypatch.setenv("NPU_GPTOSS_DISABLE_PLUGINS", switch)
    loading.load_plugins()
    assert bool(registry.kernels_of(operation)) is loaded


@pytest.mark.parametrize("ask", [explain, select_kernel])
def test_the_first_question_finds_a_plugins_kernel(operation, installed, ask):
    found = ask(operation, CALL, {"size": 1, "rows": 1}, platform=Platform("cpu"))
    assert (found.selected if ask is explain else found.kernel).name == "theirs"
    if ask is select_kernel:
        assert selected_kernels() == (("toy.add", "theirs", "theirs"),)


def test_kernels_of_plugins_load_in_the_order_of_names(operation, installed, monkeypatch):
    """Whichever comes second may find its name taken: that must not depend on the order of installation."""
    points = [entry_point(lambda n=name: lambda: register(n), name) for name in ("second", "first")]
    monkeypatch.setattr(loading, "entry_points", lambda group: points)
    loading.load_kernels()
    assert [name for name in registry.kernels if name in ("first", "second")] == ["first", "second"]


def test_a_plugin_may_be_a_module_whose_import_registers(operation):
    loading.load_plugin(entry_point(lambda: register() or sys))
    assert registry.kernels["theirs"].origin == "their-package:fast"


def test_plugins_are_loaded_once(operation, installed, monkeypatch):
    loads = []
    monkeypatch.setattr(loading, "entry_points", lambda group: loads.append(group) or [])
    loading.load_plugins()
    loading.load_plugins()
    assert loads == ["npu_gptoss.kernels"]
