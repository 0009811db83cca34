from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from npu_gptoss.kernels import platform
from npu_gptoss.kernels.platform import Capability, Platform, current_platform, detect, platform_override
from tests.refused import refused


def machine(root: Path, *device_files: str) -> Path:
    (root / "dev").mkdir()
    for name in device_files:
        (root / "dev" / name).touch()
    return root


@pytest.fixture(autouse=True)
def no_override(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_GPTOSS_PLATFORM", raising=False)


@pytest.mark.parametrize(
    ("files", "torch_npu", "kind"),
    [
        ((), False, "cpu"),
        (("nvidia0", "nvidiactl"), False, "cuda"),
        (("nvidiactl",), False, "cpu"),  # the driver's control file without a card
        (("davinci0", "davinci_manager"), True, "ascend"),
        (("davinci_manager",), True, "cpu"),
        (("davinci0",), False, "cpu"),  # a card that torch cannot reach
        ((), True, "cpu"),  # torch_npu on a laptop
    ],
)
def test_platform_is_detected_from_files_and_modules(tmp_path, monkeypatch, files, torch_npu, kind):
    installed = {"torch_npu": tmp_path / "torch_npu/__init__.py"} if torch_npu else {}
    monkeypatch.setattr(platform, "_file_of", installed.get)
    assert detect(machine(tmp_path, *files)).kind == kind


def test_environment_variable_decides_over_device_files(tmp_path, monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_PLATFORM", "ascend")
    assert detect(machine(tmp_path, "nvidia0")).kind == "ascend"


def test_unknown_platform_name_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_PLATFORM", "tpu")
    with refused("platform"):
        detect()


def test_override_keeps_installed_features_by_default(monkeypatch):
    monkeypatch.setattr(platform, "_detected", lambda: Platform("cpu", frozenset({"triton"})))
    with platform_override("cuda") as there:
        assert there == Platform("cuda", frozenset({"triton"}))
    with platform_override("cuda", frozenset()) as bare:
        assert bare == Platform("cuda")


def test_a_half_installed_module_is_no_feature(tmp_path, monkeypatch):
    """Python then raises ValueError instead of finding nothing."""
    monkeypatch.setitem(sys.modules, "torch_npu", ModuleType("torch_npu"))
    assert "torch_npu" not in detect(machine(tmp_path)).features


@pytest.mark.parametrize("value", ["0", "1"])
def test_fp32_in_place_of_bf16_is_asked_for(tmp_path, monkeypatch, value):
    """No hardware does it, so that a kernel for it must not be selected by chance."""
    monkeypatch.setenv("ASCEND_EMULATOR_FP32", value)
    assert ("emulated_fp32" in detect(machine(tmp_path)).features) is (value == "1")


def test_a_kernel_for_a_platform_that_does_not_exist_is_refused():
    """It would never run, without a reason."""
    with refused("platform"):
        Capability.of("npu")


def test_capability_gives_every_reason_at_once():
    needs = Capability.of("ascend", features=("torch_npu",))
    assert needs.reasons_against(Platform("ascend", frozenset({"torch_npu"}))) == []
    assert needs.reasons_against(Platform("cpu")) == [
        "runs on ascend; this is cpu",
        "needs torch_npu, which is not installed",
    ]


def test_architecture_and_compiler_are_needs_with_reasons_of_their_own():
    needs = Capability.of("cuda", archs=((9, 0),), releases={"triton": ("3.6",)})
    hopper = Platform("cuda", frozenset({"triton"}), (9, 0), (("triton", "3.6.0"),))
    assert needs.reasons_against(hopper) == []
    for change, says in (
        ({"arch": (8, 0)}, "architecture 9.0; this machine's is 8.0"),
        ({"arch": None}, "is not known"),
        ({"releases": (("triton", "3.60.0"),)}, "needs triton 3.6, got 3.60.0"),
        ({"releases": ()}, "needs triton 3.6, got none"),
    ):
        (reason,) = needs.reasons_against(replace(hopper, **change))
        assert says in reason


def test_the_architecture_is_known_as_soon_as_cuda_is_initialised(monkeypatch):
    """Where the driver library is out of reach, the kernels of the newest GPUs must not stay away for good."""
    import torch

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(platform, "_detected", lambda: Platform("cuda"))
    monkeypatch.setattr(platform, "_architecture_by_nvml", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert current_platform().arch is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert current_platform().arch == (9, 0)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert current_platform().arch is None, "the interpreter is no GPU"


def test_the_release_of_triton_is_read_without_importing_it():
    triton = pytest.importorskip("triton", reason="triton is missing: make setup")
    assert detect().releases == (("triton", triton.__version__),)


def test_detection_opens_no_device():
    """A CUDA or NPU context in the API server breaks the workers forked from it."""
    code = (
        "import torch\n"
        "def opened(*a, **k): raise SystemExit('a device was opened')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = opened\n"
        "from npu_gptoss.kernels import current_platform, load_kernels\n"
        "current_platform(); load_kernels()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
