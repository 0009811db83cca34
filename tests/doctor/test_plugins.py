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


def test_a_well_installed_plugin_is_found(tmp_path):
    for here in (machine(tmp_path), ascend(tmp_path)):
        only(plugins.discovered(here), "ok", "npu_gptoss.plugin:register")


def test_a_plugin_that_is_not_installed_or_another_s_is_a_failure(tmp_path):
    bare = machine(tmp_path, plugins={})
    only(plugins.discovered(bare), "failed", "no package names npu_gptoss", "pip install --no-deps")
    here = machine(tmp_path, plugins={GENERAL: [("npu_gptoss", "fork.plugin:register", "fork")]})
    only(plugins.discovered(here), "failed", "fork.plugin:register of fork", "Uninstall fork")


def test_a_filter_that_leaves_the_plugin_out_is_a_failure(tmp_path):
    here = ascend(tmp_path, VLLM_PLUGINS="ascend")
    only(
        plugins.discovered(here),
        "failed",
        "VLLM_PLUGINS=ascend leaves npu_gptoss out",
        "VLLM_PLUGINS=ascend,npu_gptoss.",
    )
    only(plugins.discovered(ascend(tmp_path, VLLM_PLUGINS="ascend,npu_gptoss")), "ok")
    only(plugins.discovered(ascend(tmp_path, VLLM_PLUGINS="")), "failed", "set VLLM_PLUGINS=npu_gptoss.")


def test_without_a_vllm_that_is_served_nothing_is_asked(tmp_path):
    only(plugins.registration(machine(tmp_path, {"vllm": "0.12.0"})), "not applicable")
    here = machine(tmp_path, {"torch": "2.8.0"})
    for check in (plugins.discovered, plugins.order, plugins.platforms, plugins.registration):
        only(check(here), "not applicable")


def test_plugin_after_ours_is_a_warning(tmp_path):
    only(plugins.order(ascend(tmp_path)), "ok", "in this order: ascend_enhanced_model, npu_gptoss.")
    before = machine(tmp_path, plugins=with_plugin(GENERAL, OTHER, first=True))
    only(plugins.order(before), "ok", "other_gpt_oss, npu_gptoss")
    behind = machine(tmp_path, plugins=with_plugin(GENERAL, OTHER))
    only(
        plugins.order(behind),
        "warning",
        "other_gpt_oss of other-gpt-oss",
        "replaces it",
        "VLLM_PLUGINS=npu_gptoss,npu_gptoss_cpu leaves",
    )
    only(plugins.order(machine(tmp_path, plugins={})), "not applicable")


def test_second_platform_is_reported(tmp_path):
    second = ("other_npu", "other:platform", "other-npu")
    here = ascend(tmp_path, plugins=with_plugin(PLATFORMS, second, ASCEND_PLUGINS))
    only(plugins.platforms(here), "warning", "(other_npu)", "VLLM_PLUGINS=ascend,ascend_enhanced_model,npu_gptoss")
    here = machine(tmp_path, plugins=with_plugin(PLATFORMS, second))
    only(plugins.platforms(here), "warning", "(other_npu)", "VLLM_PLUGINS=npu_gptoss_cpu,npu_gptoss")
    filtered = machine(tmp_path, plugins=with_plugin(PLATFORMS, second), VLLM_PLUGINS="npu_gptoss_cpu,npu_gptoss")
    assert "(other_npu)" not in plugins.platforms(filtered).sentence


def test_the_ascend_platform_must_be_there_and_pass_the_filter(tmp_path):
    only(plugins.platforms(ascend(tmp_path)), "ok", "ascend, of vllm-ascend")
    only(plugins.platforms(ascend(tmp_path, plugins=CPU_PLUGINS)), "failed", "no package names it", "vllm-ascend")
    here = ascend(tmp_path, VLLM_PLUGINS="npu_gptoss")
    only(plugins.platforms(here), "failed", "VLLM_PLUGINS leaves ascend out", "VLLM_PLUGINS=npu_gptoss,ascend.")


def test_the_cpu_platform_must_be_there_and_pass_the_filter(tmp_path, monkeypatch):
    monkeypatch.setattr(plugins.cpu_platform, "objections", lambda root: [])
    only(plugins.platforms(machine(tmp_path)), "ok", "there is no second one")
    only(plugins.platforms(machine(tmp_path, plugins={})), "failed", "no package names one", "pip install")
    here = machine(tmp_path, VLLM_PLUGINS="npu_gptoss")
    only(plugins.platforms(here), "failed", "leaves npu_gptoss_cpu out", "VLLM_PLUGINS=npu_gptoss,npu_gptoss_cpu.")
    monkeypatch.setattr(plugins.cpu_platform, "objections", lambda root: ["an accelerator is present: /dev/kfd"])
    only(plugins.platforms(machine(tmp_path)), "failed", "/dev/kfd", "NPU_GPTOSS_PLATFORM=cpu")
    built = machine(tmp_path, {**CPU_PACKAGES, "vllm": "0.11.0+cpu"})
    only(plugins.platforms(built), "ok", "names its own platform")


def test_on_cuda_a_second_platform_is_no_harm(tmp_path):
    only(plugins.platforms(gpu(tmp_path, plugins=with_plugin(PLATFORMS, OTHER))), "ok", "its own for CUDA")


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
