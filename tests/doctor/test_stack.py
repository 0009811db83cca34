"""Every release outside of the window is named with the one to install; test_official.py has those inside."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from npu_gptoss.doctor import stack
from npu_gptoss.doctor.findings import Finding
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.releases import ASCEND_RELEASES
from scripts.setup.environments import ASCEND_STACKS, REQUIREMENTS, read_pins
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ASCEND_PACKAGES, CPU_PACKAGES, ascend, gpu, machine, only, write
from tests.doctor.test_cann import install_toolkit


def test_files_and_packages_decide_the_platform(tmp_path):
    assert machine(tmp_path).platform()[0] == "cpu"
    assert machine(tmp_path, {"vllm-ascend": "0.11.0"}).platform() == ("ascend", "vllm-ascend is installed")
    write(tmp_path / "dev/nvidia0")
    assert machine(tmp_path, {}).platform() == ("cuda", "/dev/nvidia0 is there")
    write(tmp_path / "dev/davinci3")
    assert machine(tmp_path, {}).platform() == ("ascend", "/dev/davinci3 is there")
    assert machine(tmp_path, {}, NPU_GPTOSS_PLATFORM="cpu").platform()[0] == "cpu"


def on_9_1(root: Path, packages: Mapping[str, str | None], **more: object) -> Machine:
    """An Ascend machine with CANN 9.1's stack."""
    return ascend(root, packages, **more)


PACKAGES = {machine: CPU_PACKAGES, gpu: CPU_PACKAGES, ascend: ASCEND_PACKAGES, on_9_1: ASCEND_9_1_PACKAGES}
NPU_2 = "2.7.1.post2"  # made for CANN 8.5


@pytest.mark.parametrize(
    ("check", "on", "options", "state", "phrase"),
    [
        (stack.machine, machine, {}, "ok", "a CPU machine"),
        (stack.machine, machine, {"NPU_GPTOSS_PLATFORM": "tpu"}, "failed", "=tpu names no platform"),
        (stack.machine, ascend, {"ASCEND_EMULATOR": "1"}, "ok", "emulated: real packages, no NPU"),
        (stack.python, machine, {"python": (3, 10, 0)}, "ok", ""),
        (stack.python, machine, {"python": (3, 12, 1)}, "ok", ""),
        (stack.python, machine, {"python": (3, 9, 2)}, "failed", "older than 3.10"),
        (stack.python, machine, {"python": (3, 13, 0)}, "warning", "newer than the tested releases"),
        (stack.python, ascend, {"python": (3, 12, 0)}, "failed", "wheels for 3.10, 3.11 only"),
        (stack.python, on_9_1, {"python": (3, 13, 0)}, "failed", "Use Python 3.11"),
        (stack.torch, machine, {"torch": "2.7.1"}, "ok", ""),
        (stack.torch, machine, {"torch": "2.13.0+cpu"}, "ok", ""),
        (stack.torch, machine, {"torch": "2.6.0"}, "failed", "older than 2.7"),
        (stack.torch, machine, {"torch": None}, "failed", "make setup"),
        (stack.torch, ascend, {"torch": "2.7.1+cpu"}, "ok", ""),
        (stack.torch, ascend, {"torch": "2.8.0"}, "failed", "pip install torch==2.7.1"),
        (stack.torch, ascend, {"torch": None}, "failed", "pip install torch==2.7.1"),
        (stack.torch_npu, machine, {}, "not applicable", ""),
        (stack.torch_npu, ascend, {"torch-npu": "2.7.1.post1"}, "ok", ""),
        (stack.torch_npu, ascend, {"torch-npu": NPU_2}, "warning", "made for CANN 8.5"),
        (stack.torch_npu, ascend, {"torch-npu": NPU_2, "cann": "8.5.0"}, "warning", ""),
        (stack.torch_npu, ascend, {"torch-npu": NPU_2, "cann": "8.3.RC2"}, "failed", "no kernel"),
        (stack.torch_npu, ascend, {"torch-npu": "2.7.1.post11", "cann": "8.3.RC1"}, "failed", "no kernel"),
        (stack.torch_npu, ascend, {"torch-npu": "2.7.1.dev20250724"}, "warning", "older than the operator"),
        (stack.torch_npu, ascend, {"torch-npu": "2.8.0"}, "failed", "pip install torch-npu==2.7.1"),
        (stack.torch_npu, ascend, {"torch-npu": None}, "failed", "pip install torch-npu==2.7.1"),
        (stack.vllm, machine, {"vllm": "0.11.0+empty"}, "ok", ""),
        (stack.vllm, machine, {"vllm": "0.11.0"}, "failed", "VLLM_TARGET_DEVICE=empty"),
        (stack.vllm, machine, {"vllm": "0.11.2+empty"}, "failed", "Install vLLM 0.11.0"),
        (stack.vllm, machine, {"vllm": "0.33.0"}, "failed", "VLLM_TARGET_DEVICE=empty"),
        (stack.vllm, machine, {"vllm": None}, "warning", "npu-gptoss generate"),
        (stack.vllm, ascend, {"vllm": "0.33.0"}, "failed", "not on npu"),
        (stack.vllm, ascend, {"vllm": "0.11.0+empty"}, "ok", ""),
        (stack.vllm, ascend, {"vllm": "0.11.0"}, "warning", "another platform"),
        (stack.vllm, ascend, {"vllm": None}, "failed", "no `vllm serve`"),
        (stack.vllm, gpu, {"vllm": "0.33.0"}, "ok", ""),
        (stack.vllm, gpu, {"vllm": "0.11.0"}, "warning", "pip install vllm==0.33.0"),
        (stack.vllm, gpu, {"vllm": None}, "warning", "pip install vllm==0.33.0"),
        # a resolver goes back as far as that, which has no server
        (stack.vllm, on_9_1, {"fastapi": "0.1.17"}, "failed", "fastapi>=0.115,<0.124"),
        (stack.vllm, on_9_1, {"fastapi": "0.115.0"}, "ok", ""),
        (stack.vllm_ascend, machine, {}, "not applicable", ""),
        (stack.vllm_ascend, ascend, {"vllm-ascend": "0.11.0rc2"}, "ok", ""),
        (stack.vllm_ascend, ascend, {"vllm-ascend": "0.11.0rc0"}, "failed", "install vllm-ascend 0.11.0"),
        (stack.vllm_ascend, ascend, {"vllm-ascend": "0.13.0"}, "failed", "0.11.0rc1 to 0.11.0"),
        (stack.vllm_ascend, ascend, {"vllm-ascend": None}, "failed", "pip install vllm-ascend==0.11.0"),
        # vllm-ascend would take this vLLM for a later one
        (stack.vllm_ascend, on_9_1, {"own": "0.23.0+empty"}, "failed", "export VLLM_VERSION=0.23.0"),
        (stack.vllm_ascend, on_9_1, {"own": "0.23.0+empty", "VLLM_VERSION": "0.23.0"}, "ok", ""),
        (stack.vllm_ascend, on_9_1, {"own": "0.23.0", "VLLM_VERSION": "0.24.0"}, "failed", "VLLM_VERSION is 0.24.0"),
        (stack.vllm_ascend, on_9_1, {"own": "0.23.0"}, "ok", ""),
        # not asked by this release
        (stack.vllm_ascend, ascend, {"own": "0.11.0+empty"}, "ok", ""),
        # its server would start, and end with a TypeError in its first step
        (stack.vllm_ascend, on_9_1, {"triton-ascend": None}, "failed", "pip install --no-deps triton-ascend==3.2.0"),
        (stack.vllm_ascend, on_9_1, {"triton-ascend": "3.1.9"}, "warning", "triton-ascend==3.2.0"),
        (
            stack.vllm_ascend,
            on_9_1,
            {"triton-ascend": None, "python": (3, 12, 0)},
            "failed",
            "triton-ascend==3.2.2` from",
        ),
        (stack.vllm_ascend, on_9_1, {"triton-ascend": None, "ASCEND_EMULATOR": "1"}, "ok", ""),
        (stack.torch_npu, on_9_1, {"vllm": "0.11.0+empty"}, "failed", "torch-npu 2.7.1"),
    ],
)
def test_parts_outside_the_window_are_named(tmp_path, check, on, options, state, phrase):
    """options: packages, environment variables, `python`, the version of an installed `cann`, vLLM's `own` version. The
    last finding counts."""
    packages = {**PACKAGES[on], **{name: v for name, v in options.items() if name.islower()}}
    more = {name: v for name, v in options.items() if name.isupper() or name == "python"}
    if "own" in options:
        place = write(tmp_path / "vllm/_version.py", f"version: str\n__version__ = version = '{options['own']}'\n")
        more["folders"] = {"vllm": place.parent}
    if "cann" in options:
        more["ASCEND_HOME_PATH"] = str(install_toolkit(tmp_path / "cann", options["cann"]))
    found = check(on(tmp_path, packages, **more))
    *_, last = [found] if isinstance(found, Finding) else found
    only(last, state, phrase)


@pytest.mark.parametrize(
    ("release", "mistake"),
    [
        ("0.10.0rc1", "leaves out the attention sinks"),
        ("0.14.0rc1", "leaves out the attention sinks and the experts' biases"),
        ("0.15.0rc1", None),  # nearly right
        ("0.16.0rc1", "another activation"),
        ("0.18.0", "another activation"),
        ("0.19.1rc1", "129 keys"),
        ("0.30.0rc2", "129 keys"),
        ("0.31.0", None),  # not read
    ],
)
def test_release_that_is_silently_wrong_fails_with_its_defect(tmp_path, release, mistake):
    here = ascend(tmp_path, {**ASCEND_PACKAGES, "vllm-ascend": release})
    found = only(stack.vllm_ascend(here), "failed", "gpt-oss is served on")
    assert (mistake in found.sentence) if mistake else ("without an error" not in found.sentence)
    assert "without an error" not in only(stack.vllm_ascend(ascend(tmp_path)), "ok").sentence, "this package mends it"


def test_the_emulated_environments_are_within_the_window():
    for row, lock in zip(ASCEND_RELEASES, ASCEND_STACKS.values(), strict=True):
        pins = read_pins(REQUIREMENTS / f"{lock}.txt")
        releases = (row.torch.recommended, row.torch_npu.recommended, row.vllm_ascend.recommended)
        assert releases == (pins["torch"], pins["torch-npu"], pins["vllm-ascend"])
