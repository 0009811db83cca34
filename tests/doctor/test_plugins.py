"""Entry points that are missing, filtered, in the wrong order or one too many; and vLLM's model after loading."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_gptoss.doctor import plugins
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.platform import GROUP as PLATFORMS
from tests.doctor.machines import ASCEND_PLUGINS, CPU_PACKAGES, CPU_PLUGINS, GENERAL, ascend, gpu, machine, only, write
from tests.markdown import ROOT

OTHER = ("other_gpt_oss", "other:register", "other-gpt-oss")


def with_plugin(group, entry, base=CPU_PLUGINS, *, first=False):
    return {**base, group: (entry, *base[group]) if first else (*base[group], entry)}


FORK = {GENERAL: [("npu_gptoss", "fork.plugin:register", "fork")]}


@pytest.mark.parametrize(
    ("on", "options", "state", "phrases"),
    [
        (machine, {}, "ok", ["npu_gptoss.plugin:register"]),
        (ascend, {}, "ok", ["npu_gptoss.plugin:register"]),
        (machine, {"plugins": {}}, "failed", ["no package names npu_gptoss", "pip install --no-deps"]),
        (machine, {"plugins": FORK}, "failed", ["fork.plugin:register of fork", "Uninstall fork"]),
        (ascend, {"VLLM_PLUGINS": "ascend"}, "failed", ["leaves npu_gptoss out", "VLLM_PLUGINS=ascend,npu_gptoss."]),
        (ascend, {"VLLM_PLUGINS": "ascend,npu_gptoss"}, "ok", []),
        (ascend, {"VLLM_PLUGINS": ""}, "failed", ["set VLLM_PLUGINS=npu_gptoss."]),
    ],
)
def test_plugin_is_found_or_its_absence_has_a_remedy(tmp_path, on, options, state, phrases):
    only(plugins.discovered(on(tmp_path, **options)), state, *phrases)


def test_without_a_vllm_that_is_served_nothing_is_asked(tmp_path):
    only(plugins.registration(machine(tmp_path, {"vllm": "0.12.0"})), "not applicable")
    here = machine(tmp_path, {"torch": "2.8.0"})
    for check in (plugins.discovered, plugins.order, plugins.platforms, plugins.registration):
        only(check(here), "not applicable")


@pytest.mark.parametrize(
    ("on", "options", "state", "phrases"),
    [
        (ascend, {}, "ok", ["in this order: ascend_enhanced_model, npu_gptoss."]),
        (machine, {"plugins": with_plugin(GENERAL, OTHER, first=True)}, "ok", ["other_gpt_oss, npu_gptoss"]),
        (
            machine,
            {"plugins": with_plugin(GENERAL, OTHER)},
            "warning",
            ["other_gpt_oss of other-gpt-oss", "replaces it", "VLLM_PLUGINS=npu_gptoss,npu_gptoss_cpu leaves"],
        ),
        (machine, {"plugins": {}}, "not applicable", []),
    ],
)
def test_plugin_after_ours_is_a_warning(tmp_path, on, options, state, phrases):
    only(plugins.order(on(tmp_path, **options)), state, *phrases)


SECOND = ("other_npu", "other:platform", "other-npu")
ON_ASCEND, ON_CPU = with_plugin(PLATFORMS, SECOND, ASCEND_PLUGINS), with_plugin(PLATFORMS, SECOND)
BUILT_FOR_A_CPU = {**CPU_PACKAGES, "vllm": "0.11.0+cpu"}


@pytest.mark.parametrize(
    ("on", "options", "state", "phrases"),
    [
        (ascend, {"plugins": ON_ASCEND}, "warning", ["(other_npu)", "=ascend,ascend_enhanced_model,npu_gptoss"]),
        (machine, {"plugins": ON_CPU}, "warning", ["(other_npu)", "VLLM_PLUGINS=npu_gptoss_cpu,npu_gptoss"]),
        (machine, {"plugins": ON_CPU, "VLLM_PLUGINS": "npu_gptoss_cpu,npu_gptoss"}, "ok", ["no second one"]),
        (ascend, {}, "ok", ["ascend, of vllm-ascend"]),
        (ascend, {"plugins": CPU_PLUGINS}, "failed", ["no package names it", "vllm-ascend"]),
        (ascend, {"VLLM_PLUGINS": "npu_gptoss"}, "failed", ["leaves ascend out", "VLLM_PLUGINS=npu_gptoss,ascend."]),
        (machine, {}, "ok", ["there is no second one"]),
        (machine, {"plugins": {}}, "failed", ["no package names it", "pip install"]),
        (machine, {"VLLM_PLUGINS": "npu_gptoss"}, "failed", ["out", "VLLM_PLUGINS=npu_gptoss,npu_gptoss_cpu."]),
        (machine, {"packages": BUILT_FOR_A_CPU}, "ok", ["names its own platform"]),
        (gpu, {"plugins": with_plugin(PLATFORMS, OTHER)}, "ok", ["its own for CUDA"]),
    ],
)
def test_one_platform_is_there_and_passes_the_filter(tmp_path, monkeypatch, on, options, state, phrases):
    monkeypatch.setattr(plugins.cpu_platform, "objections", lambda root: [])
    only(plugins.platforms(on(tmp_path, **options)), state, *phrases)


def test_cpu_platform_is_not_named_on_a_machine_with_an_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins.cpu_platform, "objections", lambda root: ["an accelerator is present: /dev/kfd"])
    only(plugins.platforms(machine(tmp_path)), "failed", "/dev/kfd", "NPU_GPTOSS_PLATFORM=cpu")


# What vLLM ends up with: a stand-in for the process that loads vLLM prints what the real one would


@pytest.fixture
def loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(code: str, **environ: str):
        write(tmp_path / "modules/stand_in.py", code)
        monkeypatch.setattr(plugins, "REGISTERED", "stand_in")
        paths = os.pathsep.join((str(tmp_path / "modules"), str(ROOT)))
        return plugins.registration(machine(tmp_path, PYTHONPATH=paths, PATH=os.environ["PATH"], **environ))

    return run


RUNS = 'print(\'noise\'); print(\'{"device": "%s", "model": "%s"}\')'


@pytest.mark.parametrize(
    ("code", "state", "phrases"),
    [
        (RUNS % ("cpu", "npu_gptoss.serving.model:GptOssForCausalLM"), "ok", ["vLLM runs on cpu"]),
        (RUNS % ("cpu", "other:GptOss"), "failed", ["other:GptOss", "VLLM_PLUGINS"]),
        (RUNS % ("", ""), "failed", ["no platform, expected cpu"]),
        ('raise ImportError("libx.so: no such file")', "failed", ["does not load", "exit code 1", "libx.so: no such"]),
        ('raise RuntimeError("Only one platform plugin can be activated")', "failed", ["Only one platform plugin"]),
        ("import time; time.sleep(60)", "failed", ["did not end within 2 s"]),
    ],
    ids=["ours", "replaced", "no platform", "does not load", "two platforms", "hangs"],
)
def test_platform_and_model_of_vllm_are_reported(loading, monkeypatch, code, state, phrases):
    if "sleep" in code:
        monkeypatch.setattr(plugins, "LIMIT", 2)
    only(loading(code), state, *phrases)


@pytest.mark.serving
def test_model_replaced_by_a_later_plugin_is_found_in_the_real_vllm(tmp_path):
    pytest.importorskip("vllm")
    info = tmp_path / "packages/other-1.0.dist-info"
    write(info / "METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    write(info / "entry_points.txt", "[vllm.general_plugins]\nother = other:register\n")
    code = "from vllm import ModelRegistry\n"
    code += "def register(): ModelRegistry.register_model('GptOssForCausalLM', 'other_model:Model')\n"
    write(tmp_path / "packages/other.py", code)
    # behind the installed packages: entry points come in the order of sys.path
    write(tmp_path / "first/sitecustomize.py", f"import sys; sys.path.append({str(tmp_path / 'packages')!r})")
    path = os.pathsep.join((str(tmp_path / "first"), str(ROOT)))
    environ = {**os.environ, "PYTHONPATH": path, "NPU_GPTOSS_PLATFORM": "cpu"}
    environ.pop("VLLM_PLUGINS", None)
    only(
        plugins.registration(Machine(environ=environ)),
        "failed",
        "would run other_model:Model",
        "another plugin replaces",
    )
