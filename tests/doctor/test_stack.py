"""Every release outside of the window is named with the one to install."""

from __future__ import annotations

import pytest

from npu_gptoss.doctor import stack
from npu_gptoss.serving.lines import TORCH_OLDEST, here
from scripts.setup import environments
from tests.doctor.machines import ASCEND_PACKAGES, CPU_PACKAGES, ascend, machine, only, write
from tests.doctor.test_cann import install_toolkit
from tests.markdown import ROOT


def without(packages, name):
    return {key: value for key, value in packages.items() if key != name}


def test_what_makes_an_ascend_machine_and_what_a_cuda_machine(tmp_path):
    assert machine(tmp_path).platform()[0] == "cpu"
    assert machine(tmp_path, {"vllm_ascend": "0.11.0"}).platform() == ("ascend", "vllm-ascend is installed")
    write(tmp_path / "dev/nvidia0")
    assert machine(tmp_path, {}).platform() == ("cuda", "/dev/nvidia0 is there")
    write(tmp_path / "dev/davinci3")
    assert machine(tmp_path, {}).platform() == ("ascend", "/dev/davinci3 is there")
    assert machine(tmp_path, {}, NPU_GPTOSS_PLATFORM="cpu").platform()[0] == "cpu"


def test_a_platform_that_does_not_exist_is_refused_in_words(tmp_path):
    only(
        stack.machine(machine(tmp_path, NPU_GPTOSS_PLATFORM="tpu")), "failed", "=tpu names no platform", "ascend, cuda"
    )
    only(stack.machine(machine(tmp_path)), "ok", "a CPU machine")
    emulated = machine(tmp_path, NPU_GPTOSS_PLATFORM="ascend", ASCEND_EMULATOR="1")
    only(stack.machine(emulated), "ok", "an Ascend machine", "emulated", "no NPU")


@pytest.mark.parametrize(
    ("on", "python", "state", "phrase"),
    [
        (machine, (3, 10, 0), "ok", ""),
        (machine, (3, 12, 1), "ok", ""),
        (machine, (3, 9, 2), "failed", "older than 3.10"),
        (machine, (3, 13, 0), "warning", "newer than what is tested"),
        (ascend, (3, 11, 13), "ok", ""),
        (ascend, (3, 10, 0), "warning", "Use Python 3.11"),
        (ascend, (3, 12, 0), "failed", "no wheel"),
        (ascend, (3, 9, 0), "failed", "no wheel"),
    ],
)
def test_python(tmp_path, on, python, state, phrase):
    only(stack.python(on(tmp_path, python=python)), state, phrase)


@pytest.mark.parametrize(
    ("on", "release", "state", "phrase"),
    [
        (machine, "2.7.1", "ok", ""),
        (machine, "2.13.0+cpu", "ok", ""),
        (machine, "2.6.0", "failed", "older than 2.7"),
        (machine, None, "failed", "make setup"),
        (ascend, "2.7.1+cpu", "ok", ""),
        (ascend, "2.8.0", "failed", "pip install torch==2.7.1"),
        (ascend, None, "failed", "pip install torch==2.7.1"),
    ],
)
def test_torch(tmp_path, on, release, state, phrase):
    base = ASCEND_PACKAGES if on is ascend else CPU_PACKAGES
    only(stack.torch(on(tmp_path, without(base, "torch") | ({"torch": release} if release else {}))), state, phrase)


@pytest.mark.parametrize(
    ("release", "state", "phrase"),
    [
        ("2.7.1", "ok", ""),
        ("2.7.1.post1", "ok", ""),
        ("2.7.1.post2", "warning", "made for CANN 8.5"),
        ("2.7.1.dev20250724", "warning", "older than the operator"),
        ("2.8.0", "failed", "pip install torch-npu==2.7.1"),
        (None, "failed", "pip install torch-npu==2.7.1"),
    ],
)
def test_torch_npu(tmp_path, release, state, phrase):
    packages = without(ASCEND_PACKAGES, "torch-npu") | ({"torch-npu": release} if release else {})
    only(stack.torch_npu(ascend(tmp_path, packages)), state, phrase)


@pytest.mark.parametrize(
    ("release", "version", "state"),
    [
        ("2.7.1", "8.3.RC2", "ok"),
        ("2.7.1.post1", "8.3.RC1", "ok"),
        ("2.7.1.post2", "8.3.RC2", "failed"),
        ("2.7.1.post11", "8.3.RC1", "failed"),
        ("2.7.1.post2", "8.5.0", "warning"),
        ("2.7.1.post2", "", "warning"),
    ],
)
def test_a_torch_npu_made_for_a_later_cann_is_a_failure_on_8_3(tmp_path, release, version, state):
    packages = without(ASCEND_PACKAGES, "torch-npu") | {"torch-npu": release}
    home = install_toolkit(tmp_path / "cann", version) if version else tmp_path
    phrase = "no kernel" if state == "failed" else ""
    only(stack.torch_npu(ascend(tmp_path, packages, ASCEND_HOME_PATH=str(home))), state, phrase)


@pytest.mark.parametrize(
    ("on", "release", "state", "phrase"),
    [
        (machine, "0.11.0+empty", "ok", ""),
        (machine, "0.11.0", "failed", "VLLM_TARGET_DEVICE=empty"),
        (machine, "0.11.2+empty", "failed", "Install vLLM 0.11.0"),
        (machine, None, "warning", "npu-gptoss generate"),
        (ascend, "0.11.0+empty", "ok", ""),
        (ascend, "0.11.0", "warning", "another platform"),
        (ascend, "0.12.0+empty", "failed", "supports vLLM 0.11.0"),
        (ascend, None, "failed", "no `vllm serve`"),
    ],
)
def test_vllm(tmp_path, on, release, state, phrase):
    base = ASCEND_PACKAGES if on is ascend else CPU_PACKAGES
    only(stack.vllm(on(tmp_path, without(base, "vllm") | ({"vllm": release} if release else {}))), state, phrase)


@pytest.mark.parametrize(
    ("release", "state", "phrase"),
    [
        ("0.11.0", "ok", ""),
        ("0.11.0rc2", "ok", ""),
        ("0.11.0rc0", "failed", "install 0.11.0"),
        ("0.13.0", "failed", "0.11.0rc1 to 0.11.0"),
        (None, "failed", "pip install vllm-ascend==0.11.0"),
    ],
)
def test_vllm_ascend(tmp_path, release, state, phrase):
    packages = without(ASCEND_PACKAGES, "vllm-ascend") | ({"vllm-ascend": release} if release else {})
    only(stack.vllm_ascend(ascend(tmp_path, packages)), state, phrase)


@pytest.mark.parametrize(
    ("release", "mistake"),
    [
        ("0.10.0rc1", "leaves out the attention sinks"),
        ("0.13.0", "leaves out the attention sinks and the experts' biases"),
        ("0.14.0rc1", "leaves out the attention sinks"),
        ("0.15.0rc1", None),  # nearly right
        ("0.16.0rc1", "another activation"),
        ("0.18.0", "another activation"),
        ("0.19.1rc1", "129 keys"),
        ("0.23.0.post1", "129 keys"),
        ("0.30.0rc2", "129 keys"),
        ("0.31.0", None),  # not read
    ],
)
def test_whoever_has_a_release_that_is_wrong_without_a_word_is_told_what_is_wrong(tmp_path, release, mistake):
    packages = without(ASCEND_PACKAGES, "vllm-ascend") | {"vllm-ascend": release}
    found = only(stack.vllm_ascend(ascend(tmp_path, packages)), "failed", "gpt-oss is served on")
    assert (mistake in found.sentence) if mistake else ("without a word" not in found.sentence)


def test_the_releases_that_this_package_mends_are_not_spoken_ill_of(tmp_path):
    assert "without a word" not in only(stack.vllm_ascend(ascend(tmp_path)), "ok").sentence


def test_what_is_for_ascend_does_not_apply_elsewhere(tmp_path):
    for check in (stack.torch_npu, stack.vllm_ascend):
        only(check(machine(tmp_path)), "not applicable")


def test_the_emulated_environment_is_within_the_window():
    line = here()
    releases = (line.torch.recommended, line.torch_npu.recommended, line.vllm_ascend.recommended)
    assert releases == (environments.TORCH_ON_ASCEND, environments.TORCH_NPU, environments.VLLM_ASCEND)


def test_the_window_is_that_of_the_readme_and_of_the_package():
    line = here()
    readme, project = (ROOT / "README.md").read_text(), (ROOT / "pyproject.toml").read_text()
    assert f"**stock vLLM {line.vllm.recommended}**" in readme
    assert f'requires-python = ">={line.python[0]}"' in project
    assert f'"torch>={".".join(map(str, TORCH_OLDEST))}"' in project
