"""Every release outside of the window is named with the one to install."""

from __future__ import annotations

import pytest

from npu_gptoss.doctor import stack
from npu_gptoss.doctor.findings import Finding
from npu_gptoss.serving.releases import ASCEND_RELEASES
from scripts.setup.environments import ASCEND_STACKS, REQUIREMENTS, read_pins
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ASCEND_PACKAGES, CPU_PACKAGES, ascend, gpu, machine, only, write
from tests.doctor.test_cann import install_toolkit


def test_files_and_packages_decide_the_platform(tmp_path):
    assert machine(tmp_path).platform()[0] == "cpu"
    assert machine(tmp_path, {"vllm_ascend": "0.11.0"}).platform() == ("ascend", "vllm-ascend is installed")
    write(tmp_path / "dev/nvidia0")
    assert machine(tmp_path, {}).platform() == ("cuda", "/dev/nvidia0 is there")
    write(tmp_path / "dev/davinci3")
    assert machine(tmp_path, {}).platform() == ("ascend", "/dev/davinci3 is there")
    assert machine(tmp_path, {}, NPU_GPTOSS_PLATFORM="cpu").platform()[0] == "cpu"


def test_a_platform_that_does_not_exist_is_refused_in_words(tmp_path):
    wrong = machine(tmp_path, NPU_GPTOSS_PLATFORM="tpu")
    only(stack.machine(wrong), "failed", "=tpu names no platform", "ascend, cuda")
    only(stack.machine(machine(tmp_path)), "ok", "a CPU machine")
    emulated = machine(tmp_path, NPU_GPTOSS_PLATFORM="ascend", ASCEND_EMULATOR="1")
    only(stack.machine(emulated), "ok", "an Ascend machine", "emulated", "no NPU")


@pytest.mark.parametrize(
    ("on", "python", "state", "phrase"),
    [
        (machine, (3, 10, 0), "ok", ""),
        (machine, (3, 12, 1), "ok", ""),
        (machine, (3, 9, 2), "failed", "older than 3.10"),
        (machine, (3, 13, 0), "warning", "newer than the tested releases"),
        (ascend, (3, 11, 13), "ok", ""),
        (ascend, (3, 10, 0), "warning", "Use Python 3.11"),
        (ascend, (3, 12, 0), "failed", "no wheel"),
        (ascend, (3, 9, 0), "failed", "no wheel"),
    ],
)
def test_python(tmp_path, on, python, state, phrase):
    only(stack.python(on(tmp_path, python=python)), state, phrase)


@pytest.mark.parametrize(
    ("check", "on", "release", "state", "phrase"),
    [
        (stack.torch, machine, "2.7.1", "ok", ""),
        (stack.torch, machine, "2.13.0+cpu", "ok", ""),
        (stack.torch, machine, "2.6.0", "failed", "older than 2.7"),
        (stack.torch, machine, None, "failed", "make setup"),
        (stack.torch, ascend, "2.7.1+cpu", "ok", ""),
        (stack.torch, ascend, "2.8.0", "failed", "pip install torch==2.7.1"),
        (stack.torch, ascend, None, "failed", "pip install torch==2.7.1"),
        (stack.torch_npu, machine, None, "not applicable", ""),
        (stack.torch_npu, ascend, "2.7.1", "ok", ""),
        (stack.torch_npu, ascend, "2.7.1.post1", "ok", ""),
        (stack.torch_npu, ascend, "2.7.1.post2", "warning", "made for CANN 8.5"),
        (stack.torch_npu, ascend, "2.7.1.dev20250724", "warning", "older than the operator"),
        (stack.torch_npu, ascend, "2.8.0", "failed", "pip install torch-npu==2.7.1"),
        (stack.torch_npu, ascend, None, "failed", "pip install torch-npu==2.7.1"),
        (stack.vllm, machine, "0.11.0+empty", "ok", ""),
        (stack.vllm, machine, "0.11.0", "failed", "VLLM_TARGET_DEVICE=empty"),
        (stack.vllm, machine, "0.11.2+empty", "failed", "Install vLLM 0.11.0"),
        (stack.vllm, machine, "0.33.0", "failed", "VLLM_TARGET_DEVICE=empty"),
        (stack.vllm, ascend, "0.33.0", "failed", "not on npu"),
        (stack.vllm, machine, None, "warning", "npu-gptoss generate"),
        (stack.vllm, ascend, "0.11.0+empty", "ok", ""),
        (stack.vllm, ascend, "0.11.0", "warning", "another platform"),
        (stack.vllm, ascend, "0.12.0+empty", "failed", "supports vLLM 0.11.0"),
        (stack.vllm, ascend, None, "failed", "no `vllm serve`"),
        (stack.vllm, gpu, "0.33.0", "ok", ""),
        (stack.vllm, gpu, "0.11.0", "warning", "pip install vllm==0.33.0"),
        (stack.vllm, gpu, None, "warning", "pip install vllm==0.33.0"),
        (stack.vllm_ascend, machine, None, "not applicable", ""),
        (stack.vllm_ascend, ascend, "0.11.0", "ok", ""),
        (stack.vllm_ascend, ascend, "0.11.0rc2", "ok", ""),
        (stack.vllm_ascend, ascend, "0.11.0rc0", "failed", "install vllm-ascend 0.11.0"),
        (stack.vllm_ascend, ascend, "0.13.0", "failed", "0.11.0rc1 to 0.11.0"),
        (stack.vllm_ascend, ascend, None, "failed", "pip install vllm-ascend==0.11.0"),
    ],
)
def test_releases_outside_the_window(tmp_path, check, on, release, state, phrase):
    packages = {**(ASCEND_PACKAGES if on is ascend else CPU_PACKAGES), check.__name__.replace("_", "-"): release}
    only(check(on(tmp_path, packages)), state, phrase)


@pytest.mark.parametrize(
    ("release", "version", "state"),
    [
        ("2.7.1.post1", "8.3.RC1", "ok"),
        ("2.7.1.post2", "8.3.RC2", "failed"),
        ("2.7.1.post11", "8.3.RC1", "failed"),
        ("2.7.1.post2", "8.5.0", "warning"),
    ],
)
def test_a_torch_npu_made_for_a_later_cann_is_a_failure_on_8_3(tmp_path, release, version, state):
    home = install_toolkit(tmp_path / "cann", version)
    here = ascend(tmp_path, {**ASCEND_PACKAGES, "torch-npu": release}, ASCEND_HOME_PATH=str(home))
    only(stack.torch_npu(here), state, "no kernel" if state == "failed" else "")


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


@pytest.mark.parametrize("check", [stack.python, stack.torch, stack.torch_npu, stack.vllm, stack.vllm_ascend])
def test_a_machine_of_the_second_stack_is_not_held_to_the_first(tmp_path, check):
    here = ascend(tmp_path, ASCEND_9_1_PACKAGES, VLLM_VERSION="0.23.0")
    assert only(check(here), "ok").remedy == ""
    first = {**ASCEND_9_1_PACKAGES, "vllm": "0.11.0+empty"}
    assert any(f.state != "ok" for f in found_by(check, ascend(tmp_path, first))) == (
        check not in (stack.python, stack.vllm)
    )


def found_by(check, here):
    found = check(here)
    return [found] if isinstance(found, Finding) else list(found)


@pytest.mark.parametrize(
    ("packages", "variables", "state"),
    [
        (ASCEND_9_1_PACKAGES, {}, "failed"),
        (ASCEND_9_1_PACKAGES, {"VLLM_VERSION": "0.24.0"}, "failed"),
        (ASCEND_9_1_PACKAGES, {"VLLM_VERSION": "0.23.0"}, "ok"),
        ({**ASCEND_9_1_PACKAGES, "vllm": "0.23.0"}, {}, "ok"),
        (ASCEND_PACKAGES, {}, "ok"),
    ],
)
def test_a_vllm_that_vllm_ascend_would_take_for_a_later_one_is_a_failure(tmp_path, packages, variables, state):
    *_, last = stack.vllm_ascend(ascend(tmp_path, packages, **variables))
    only(last, state, "export VLLM_VERSION=0.23.0" if state == "failed" else "")


@pytest.mark.parametrize(("release", "state"), [("0.1.17", "failed"), ("0.115.0", "ok"), ("0.123.10", "ok")])
def test_a_fastapi_without_a_server_is_a_failure(tmp_path, release, state):
    *_, last = stack.vllm(ascend(tmp_path, {**ASCEND_9_1_PACKAGES, "fastapi": release}))
    only(last, state, "fastapi>=0.115,<0.124" if state == "failed" else "")


@pytest.mark.parametrize(
    ("release", "state"), [(None, "failed"), ("3.1.9", "warning"), *((release, "ok") for release in ("3.2.0", "3.2.2"))]
)
def test_a_9_1_machine_without_triton_ascend_is_not_called_ready(tmp_path, release, state):
    """Its server would start, and end with a TypeError in its first step."""
    packages = {**ASCEND_9_1_PACKAGES, "triton-ascend": release}
    *_, last = stack.vllm_ascend(ascend(tmp_path, packages, VLLM_VERSION="0.23.0"))
    only(last, state, "" if state == "ok" else "`pip install --no-deps triton-ascend==3.2.0`")
    emulated = ascend(tmp_path, packages, VLLM_VERSION="0.23.0", ASCEND_EMULATOR="1")
    only(stack.vllm_ascend(emulated), "ok")
    only(stack.vllm_ascend(ascend(tmp_path, {**ASCEND_PACKAGES, "triton-ascend": release})), "ok")


def test_the_emulated_environments_are_within_the_window():
    for row, lock in zip(ASCEND_RELEASES, ASCEND_STACKS.values(), strict=True):
        pins = read_pins(REQUIREMENTS / f"{lock}.txt")
        releases = (row.torch.recommended, row.torch_npu.recommended, row.vllm_ascend.recommended)
        assert releases == (pins["torch"], pins["torch-npu"], pins["vllm-ascend"])
