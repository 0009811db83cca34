"""The whole command: with vLLM, on a damaged checkpoint, without torch, and with a broken check."""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_gptoss.doctor import command, memory, plugins, probe
from npu_gptoss.doctor.cann import COMMON_DEVICE_FILES
from npu_gptoss.doctor.checkpoint import checkpoint
from npu_gptoss.doctor.checks import CHECKS, QUICK
from npu_gptoss.doctor.findings import guarded, ok
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.tiny.checkpoint import tiny_config, write_tiny
from tests.doctor.machines import ascend, machine, write
from tests.doctor.test_cann import install_driver, install_nnal, install_toolkit
from tests.markdown import ROOT

LIGHT = "import sys, npu_gptoss.doctor.command; sys.exit(bool({'torch', 'numpy', 'vllm'} & set(sys.modules)))"


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def doctor(*arguments: str, python: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *python, "-m", "npu_gptoss.cli", "doctor", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environ},
        capture_output=True,
        text=True,
        timeout=600,
    )


def findings(run: subprocess.CompletedProcess[str]) -> dict[str, dict[str, object]]:
    assert run.returncode in (0, 1), run.stderr
    report = json.loads(run.stdout)
    assert report["ok"] is (run.returncode == 0)
    return {finding["check"]: finding for finding in report["findings"]}


def test_importing_the_command_imports_the_standard_library_only():
    subprocess.run([sys.executable, "-c", LIGHT], check=True, timeout=60)


def test_a_laptop_without_torch_gets_a_report():
    run = doctor(python=("-S",))  # without site-packages
    assert run.returncode == 1
    assert run.stderr == ""
    assert "torch: torch is not installed, and nothing here computes without it." in run.stdout
    assert "→ `make setup`" in run.stdout
    assert "gpt-oss-120b on four cards" in run.stdout
    found = findings(doctor("--json", python=("-S",)))
    assert list(found) == list(CHECKS)
    assert [name for name, finding in found.items() if finding["state"] == "failed"] == ["torch"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("bpe_openai", reason="the published ranks: make setup installs them")
    folder = tmp_path_factory.mktemp("doctor") / "tiny"
    write_tiny(folder, config=tiny_config(layers=2, hidden=64, intermediate=64), mxfp4=True)
    return folder


@pytest.mark.slow
@pytest.mark.serving
def test_all_is_well_beside_vllm_with_a_whole_checkpoint(tiny):
    pytest.importorskip("vllm")
    found = findings(doctor("--json", "--model", str(tiny), "--max-model-len", "4096", NPU_GPTOSS_PLATFORM="cpu"))
    assert [f for f in found.values() if f["state"] not in ("ok", "not applicable")] == []
    assert "GptOssForCausalLM is npu_gptoss.serving.model" in found["registration"]["sentence"]
    assert "MXFP4 experts" in found["checkpoint"]["sentence"]
    assert "GB/s" in found["bandwidth"]["sentence"]
    assert found["self-test-window"]["state"] == found["vocabulary"]["state"] == found["memory"]["state"] == "ok"


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the processes that load vLLM and torch."""
    monkeypatch.setattr(plugins, "registration", lambda here: [ok("skipped")])
    monkeypatch.setattr(probe, "probe", lambda *_: [ok("skipped", check="device")])


def diagnose(here, *arguments):
    return list(command.diagnose(here, options("--max-model-len", "4096", "--max-num-seqs", "16", *arguments)))


def test_damaged_checkpoint_ends_with_one_and_a_remedy(tiny, tmp_path, capsys, monkeypatch):
    quick(monkeypatch)
    looked = functools.partial(guarded, "checkpoint", checkpoint)
    monkeypatch.setattr(probe, "probe", lambda here, model, devices: looked(model))
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in tiny.iterdir():
        (damaged / file.name).symlink_to(file)
    weights = damaged / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content[: len(content) // 2])
    monkeypatch.setenv("NPU_GPTOSS_PLATFORM", "cpu")
    assert command.run(options("--model", str(damaged), "--max-model-len", "4096")) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "failed checkpoint:" in text
    assert "model.safetensors: the file is truncated or damaged" in text
    assert "→ The download is incomplete or damaged: download the file again." in text
    assert "ok vocabulary" in text, "one failure hides no other check"


@pytest.mark.parametrize(
    ("module", "name", "check"),
    [(QUICK, "python", "python"), (memory, "memory", "memory"), (probe, "probe", "torch-works")],
)
def test_a_check_that_breaks_does_not_end_the_report(module, name, check, tmp_path, monkeypatch):
    def broken(*arguments: object) -> list[object]:
        raise ZeroDivisionError("broken")

    quick(monkeypatch)
    (monkeypatch.setitem if module is QUICK else monkeypatch.setattr)(module, name, broken)
    found = {finding.check: finding for finding in diagnose(machine(tmp_path))}
    assert found[check].state == "failed"
    assert "This check itself broke" in found[check].sentence
    assert {"python", "torch", "vllm", "memory", "graphs"} <= set(found)


def test_findings_are_printed_as_they_are_made(monkeypatch, capsys):
    """A card that hangs would otherwise show nothing for a minute."""
    quick(monkeypatch)
    printed = []

    def slow(*arguments):
        printed.append(capsys.readouterr().out)
        yield ok("skipped", check="device")
        printed.append(capsys.readouterr().out)
        yield ok("skipped", check="bandwidth")

    monkeypatch.setattr(probe, "probe", slow)
    command.run(options())
    before, device = printed
    assert "ok              machine: " in before
    assert "device: skipped" in device
    assert "vocabulary" not in device
    assert "memory: " in capsys.readouterr().out


def test_bare_ascend_machine_gets_every_missing_part_reported(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/davinci0").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = {f.check: f for f in diagnose(ascend(tmp_path, {}))}
    missing = {name for name, finding in found.items() if finding.state == "failed"}
    assert missing == {
        "torch", "torch-npu", "vllm", "vllm-ascend", "cann", "nnal", "driver", "device-files", "vocabulary",
    }  # fmt: skip
    assert list(found) == [check for check in CHECKS if check in found], "in the order of the table"


def test_a_well_set_up_910b_gets_no_complaint(tiny, tmp_path, monkeypatch):
    quick(monkeypatch)
    home = install_toolkit(tmp_path / "usr/local/Ascend/ascend-toolkit/latest", "8.3.RC2")
    atb = install_nnal(tmp_path, "8.3.RC2")
    install_driver(tmp_path, "25.3.rc1")
    for name in ("davinci0", *COMMON_DEVICE_FILES):
        write(tmp_path / "dev" / name)
    card = Device("npu", "Ascend910B3", 1, 64 * GIB, 63 * GIB)

    def passed(here, model, devices):
        devices.append(card)
        yield from (ok("skipped", check=name) for name in probe.ALL)

    monkeypatch.setattr(probe, "probe", passed)
    here = ascend(tmp_path, ASCEND_HOME_PATH=str(home), ATB_HOME_PATH=str(atb))
    found = diagnose(here, "--model", str(tiny))
    assert [finding for finding in found if finding.state != "ok"] == []
    assert {"cann", "nnal", "driver", "device-files", "plugin", "memory", "graphs"} <= {f.check for f in found}
