"""A failed import, a crash and a hang of the child become findings that name the check that ran."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from npu_gptoss.doctor import probe
from npu_gptoss.doctor.findings import Finding, ok
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.errors import Refusal
from npu_gptoss.serving import releases
from npu_gptoss.serving.ascend import limits
from tests.doctor.machines import machine, only, write
from tests.markdown import ROOT


@pytest.fixture
def with_torch(tmp_path: Path):
    """Runs the real child with a torch that is made of the given code."""

    def run(code: str) -> list[Finding]:
        write(tmp_path / "modules/torch.py", code)
        paths = os.pathsep.join((str(tmp_path / "modules"), str(ROOT)))
        return list(probe.probe(machine(tmp_path, PYTHONPATH=paths, PATH=os.environ["PATH"]), None, []))

    return run


def states(found: list[Finding]) -> dict[str, str]:
    return {finding.check: finding.state for finding in found}


def test_torch_that_does_not_import_is_reported_with_its_error(with_torch):
    probed = with_torch('raise ImportError("libhccl.so: cannot open shared object file")')
    only(probed[:1], "failed", "torch cannot be imported: libhccl.so", "set_env.sh")
    assert states(probed) == {**dict.fromkeys(probe.ALL, "not applicable"), "torch-works": "failed"}


def test_crash_and_hang_are_reported(with_torch, monkeypatch):
    probed = with_torch('import os, sys; print("double free", file=sys.stderr, flush=True); os.abort()')
    only(probed[:1], "failed", "was ended by SIGABRT: double free", "do not fit together")
    assert states(probed)["device"] == "not applicable"
    monkeypatch.setattr(probe, "LIMIT", 1)
    only(with_torch("import time; time.sleep(60)")[:1], "failed", "did not end within 1 s")


def test_without_torch_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(probe.subprocess, "Popen", None)
    probed = list(probe.probe(machine(tmp_path, {}), None, []))
    assert states(probed) == dict.fromkeys(probe.ALL, "not applicable")


def test_findings_before_a_crash_are_kept_and_the_crashed_check_is_named():
    device, finding = Device("npu", "Ascend910B3", 1, 64, 60), ok("x", check="torch-works")
    sent = ["torch-works", finding, device, "self-test-sink", probe.End(probe._ending(-11))]
    devices: list[Device] = []
    probed = list(probe.findings_of(sent, devices))
    assert probed[0] == ok("x", check="torch-works")
    only(probed[1:2], "failed", "The process of this check was ended by SIGSEGV.")
    assert probed[1].check == "self-test-sink"
    assert devices == [device]
    assert set(states(probed)) == set(probe.ALL)


def test_a_device_that_is_not_there_is_a_failure(monkeypatch):
    seen: list[Device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    only(probe.device("cuda", False, seen), "failed", "There is no cuda device that works", "NPU_GPTOSS_PLATFORM=cpu")
    assert seen == []


def test_cpu_is_reported_with_its_memory():
    seen: list[Device] = []
    only(probe.device("cpu", False, seen), "ok", "core(s)", "RAM available")
    assert 0 < seen[0].free <= seen[0].total


@pytest.mark.parametrize(
    ("device", "state", "phrase"),
    [
        (Device("npu", "Ascend910B3", 8, 64 * GIB, 60 * GIB), "ok", "8 × Ascend910B3 with 64.0 GiB each, 60.0 GiB"),
        (Device("npu", "Ascend910B3", 1, 4 * GIB, 4 * GIB, True), "ok", "an emulated Ascend910B3"),
        (Device("npu", "Ascend910_9391", 16, 64 * GIB, 60 * GIB), "ok", "16 × Ascend910_9391"),
        (Device("npu", "Ascend310P3", 1, 64 * GIB, 60 * GIB), "warning", "made for Ascend 910B (A2) and 910C (A3)"),
    ],
)
def test_another_card_than_a_910b_or_910c_is_a_warning(device, state, phrase):
    only([probe._device_finding("ascend", device)], state, phrase)


@pytest.mark.parametrize(
    ("card", "built", "state", "phrase"),
    [
        ("Ascend910B3", "A2", "ok", ""),
        ("Ascend910B3", "A3", "failed", "`vllm-ascend:v0.23.0`"),
        ("Ascend910_9391", "A2", "failed", "`vllm-ascend:v0.23.0-a3`"),
        ("Ascend910_9391", "A3", "ok", ""),
    ],
)
def test_a_vllm_ascend_for_another_card_is_named(card, built, state, phrase, monkeypatch, tmp_path):
    (tmp_path / "_build_info.py").write_text(f"# Auto-generated file\n__device_type__ = '{built}'\n")
    monkeypatch.setattr(releases, "package_folder", lambda name: tmp_path)
    only([probe._device_finding("ascend", Device("npu", card, 8, 64 * GIB, 60 * GIB))], state, phrase)


@pytest.mark.parametrize(
    ("objection", "state", "phrases"),
    [
        (
            Refusal("torch-npu", "2.5.1", "no sinks", "install 2.7.1"),
            "failed",
            ["torch-npu 2.5.1: no", "Install 2.7.1."],
        ),
        (ImportError("No module"), "failed", ["torch_npu cannot be imported (No module", "See torch-npu"]),
        (None, "ok", ["takes learnable_sink"]),
    ],
)
def test_an_operator_without_sinks_is_a_failure(monkeypatch, objection, state, phrases):
    monkeypatch.setattr(limits, "operator_objection", mock.Mock(side_effect=[objection]))
    only(probe.attention_operator(), state, *phrases)


@pytest.mark.parametrize(
    ("line", "names", "state", "phrase"),
    [
        (1, ("aclrtValueWait", "aclrtValueWrite"), "ok", "can wait"),
        (1, ("aclrtValueWait",), "warning", "without aclrtValueWrite"),
        (1, (), "warning", "without aclrtValueWait and aclrtValueWrite"),
        (0, (), "ok", "can wait"),  # torch-npu 2.7.1 has events of another kind
    ],
)
def test_graphs_whose_calls_would_not_wait_for_lengths_are_a_warning(monkeypatch, line, names, state, phrase):
    monkeypatch.setattr(limits.releases, "ascend_release", lambda: limits.releases.ASCEND_RELEASES[line])
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.10.0.post4"))
    monkeypatch.setattr(limits.ctypes, "CDLL", lambda name: SimpleNamespace(**dict.fromkeys(names)))
    only(probe.graph_updates(), state, phrase)


@pytest.mark.parametrize(
    ("body", "phrase"),
    [
        ("while True: pass", "did not end within 1 s"),
        ("os.abort()", "was ended by SIGABRT"),
        ("raise ValueError('x')", "This check itself broke"),
    ],
)
def test_self_test_in_its_own_process_ends_no_other_check(body, phrase, tmp_path, monkeypatch):
    """A replay that waits for ever must not end the tests after it."""
    write(tmp_path / "torch.py", f"import os\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    monkeypatch.setattr(probe, "ALONE_LIMIT", 1 if "while" in body else 60)
    found = probe.alone("self-test-graph", Device("npu", "Ascend910B3", 1, 64, 60))
    only(found, "failed", phrase)
    assert found[0].check == "self-test-graph"
