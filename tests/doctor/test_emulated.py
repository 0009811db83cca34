"""On the emulated 910B the doctor reports a 910B, and all is well."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_emulator.launch import Machine

from emulator.tests.machine import emulate
from npu_gptoss.doctor.checks import SELF_TESTS
from npu_gptoss.tiny.checkpoint import tiny_config, write_tiny
from npu_gptoss.verify.self_test.record import FILE
from tests.markdown import ROOT

pytestmark = pytest.mark.emulated


@pytest.mark.slow
def test_the_doctor_reports_a_910b_and_all_is_well(tmp_path: Path) -> None:
    pytest.importorskip("bpe_openai", reason="the published ranks: make setup installs them")
    write_tiny(tmp_path / "tiny", config=tiny_config(layers=2, hidden=64, intermediate=64), mxfp4=True)
    arguments = ("--json", "--model", str(tmp_path / "tiny"), "--max-model-len", "4096")
    run = emulate(
        *("-m", "npu_gptoss.cli", "doctor", *arguments),
        machine=Machine(devices=2),
        timeout=600,
        PYTHONPATH=str(ROOT),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    report = json.loads(run.stdout)
    found = {finding["check"]: finding for finding in report["findings"]}
    assert [finding for finding in report["findings"] if finding["state"] == "failed"] == []
    assert report["platform"] == "ascend"
    assert found["device"]["sentence"].startswith("2 × Ascend910B3 with 4.0 GiB each")
    assert "an emulated Ascend910B3" in found["device"]["sentence"]
    assert "CANN 8.3.RC1" in found["cann"]["sentence"]
    assert "vLLM runs on npu" in found["registration"]["sentence"]
    assert "takes learnable_sink" in found["attention-operator"]["sentence"]
    kernels = {f["subject"]: f["sentence"] for f in report["findings"] if f["check"] == "kernels"}
    assert kernels["attention.paged"] == "attention.paged.ascend is selected."
    assert kernels["moe.experts"] == "moe.experts.ascend is selected."
    for test in SELF_TESTS:
        states = {finding["state"] for finding in report["findings"] if finding["check"] == test}
        assert states == {"ok"}, test
    assert "all right (9 self-tests)" in found["self-test-record"]["sentence"]
    remembered = json.loads((tmp_path / "cache/npu_gptoss" / FILE).read_text())
    assert [set(seen["tests"].values()) for seen in remembered.values()] == [{"ok"}]
    for name in ("bandwidth", "driver", "nnal", "device-files"):
        assert found[name]["state"] == "not applicable"
