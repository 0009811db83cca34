"""Our model's class is inspected without another process, with the same result."""

from __future__ import annotations

import subprocess

import pytest
from ascend_emulator.launch import Machine, environment
from vllm.model_executor.models import registry

from emulator.tests.machine import venv
from npu_gptoss.serving.releases import here, vllm_0_11

MODULE, _, NAME = here().model.partition(":")


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Architectures that were inspected in another process; here that runs in this process."""
    asked: list[str] = []

    def run(look):
        found = look()
        asked.append(found.architecture)
        return found

    monkeypatch.setattr(registry, "_run_in_subprocess", run)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_load_modelinfo_from_cache", lambda *_: None)
    monkeypatch.setattr(registry._LazyRegisteredModel, "_save_modelinfo_to_cache", lambda *_: None)
    return asked


def test_our_class_is_inspected_in_the_same_process(processes) -> None:
    stock = registry._LazyRegisteredModel(MODULE, NAME).inspect_model_cls()
    assert vllm_0_11.registered_model(MODULE, NAME).inspect_model_cls() == stock
    assert processes == [NAME]
    assert stock.is_text_generation_model
    assert stock.supports_pp


@pytest.mark.emulated
@pytest.mark.slow
def test_inspection_of_our_class_starts_no_npu() -> None:
    """Otherwise the engine, which is forked later, could not use the device."""
    place = venv(Machine())
    code = (
        "import torch, torch_npu; from vllm import ModelRegistry; from vllm.plugins import load_general_plugins; "
        f"load_general_plugins(); ModelRegistry.models[{NAME!r}].inspect_model_cls(); "
        "print(torch.npu.is_initialized()); torch.ones(1, device='npu'); print(torch.npu.is_initialized())"
    )
    command = [str(place / "bin/python"), "-c", code]
    done = subprocess.run(command, env=environment(Machine(), place), capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-2:] == ["False", "True"], done.stderr[-3000:]
