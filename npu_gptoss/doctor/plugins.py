"""Checks that vLLM finds this package: entry points, their order, the filter VLLM_PLUGINS, and one platform only.

vLLM 0.11.0 loads every entry point of `vllm.general_plugins` in the order in which packages are installed; the last to
register a model wins. Of `vllm.platform_plugins` one may answer, a second is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import EntryPoint

from npu_gptoss import plugin as entry
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, one_line, warning
from npu_gptoss.doctor.machine import ASCEND, CPU, CUDA, DEVICE_TYPES, Machine
from npu_gptoss.serving import platform as cpu_platform
from npu_gptoss.serving import releases

GENERAL = "vllm.general_plugins"
OURS, VALUE = "npu_gptoss", "npu_gptoss.plugin:register"
ASCENDS = "ascend"
FILTER = "VLLM_PLUGINS"
KNOWN = ("vllm", "vllm-ascend", "vllm_ascend", "npu-gptoss", "npu_gptoss")  # whose plugins leave gpt-oss alone
REGISTERED = "npu_gptoss.serving.registered"
REINSTALL = "Install npu-gptoss into the environment of vLLM: `python -m pip install --no-deps .` in its checkout."
LIMIT = 300  # seconds for the process that loads vLLM; it takes ten


def _allowed(here: Machine) -> list[str] | None:
    text = here.environ.get(FILTER)
    return None if text is None else text.split(",")


def loaded(here: Machine, group: str) -> list[EntryPoint]:
    """The plugins of a group that vLLM loads, in its order."""
    allowed = _allowed(here)
    return [p for p in here.entry_points(group) if allowed is None or p.name in allowed]


def _origin(plugin: EntryPoint) -> str:
    return plugin.dist.name if plugin.dist is not None else "an unknown package"


def _filter_remedy(here: Machine, *names: str) -> str:
    wanted = [*(_allowed(here) or []), *names]
    return f"Unset {FILTER}, or set {FILTER}={','.join(dict.fromkeys(filter(None, wanted)))}."


def discovered(here: Machine) -> Finding:
    if here.vllm is None:
        return not_applicable("vLLM, which would load it, is not installed.")
    installed = [p for p in here.entry_points(GENERAL) if p.name == OURS]
    if not installed:
        return failed(f"vLLM does not find the plugin: no package names {OURS} in {GENERAL}.", REINSTALL)
    if all(p.value != VALUE for p in installed):
        other = _origin(installed[0])
        found = f"The plugin {OURS} that vLLM finds is {installed[0].value} of {other}, not {VALUE}."
        return failed(found, f"Uninstall {other}. {REINSTALL}")
    if OURS not in (p.name for p in loaded(here, GENERAL)):
        lost = "vLLM would serve gpt-oss without sinks and biases, or not at all"
        return failed(f"{FILTER}={here.environ[FILTER]} leaves {OURS} out: {lost}.", _filter_remedy(here, OURS))
    return ok(f"vLLM finds the plugin {OURS} ({installed[0].value}).")


def order(here: Machine) -> Finding:
    plugins = loaded(here, GENERAL) if here.vllm else []
    names = [p.name for p in plugins]
    if OURS not in names:
        return not_applicable("The plugin is not loaded.")
    behind = [p for p in plugins[names.index(OURS) + 1 :] if _origin(p) not in KNOWN]
    listed = f"vLLM loads, in this order: {', '.join(names)}."
    if behind:
        others = ", ".join(f"{p.name} of {_origin(p)}" for p in behind)
        keep = [name for name in names if name not in {p.name for p in behind}]
        keep += [p.name for p in loaded(here, cpu_platform.GROUP)]
        return warning(
            f"{listed} What comes after {OURS} ({others}) and registers {entry.ARCHITECTURE} replaces it.",
            f"The check registration below shows vLLM's model; {FILTER}={','.join(keep)} leaves the others out.",
        )
    return ok(listed)


def platforms(here: Machine) -> Finding:
    kind = here.platform()[0]
    release = here.vllm
    if release is None:
        return not_applicable("vLLM is not installed.")
    if kind == CUDA:
        return ok("vLLM's platform is its own for CUDA.")
    names = [p.name for p in loaded(here, cpu_platform.GROUP)]
    title, wanted, install = "CPU", cpu_platform.NAME, REINSTALL
    if kind == ASCEND:
        title, wanted, install = "Ascend", ASCENDS, "Install vllm-ascend into the environment of vLLM."
    if others := [name for name in names if name not in (ASCENDS, cpu_platform.NAME)]:
        general = [p.name for p in here.entry_points(GENERAL) if _origin(p) in KNOWN]
        return warning(
            f"A second platform plugin is installed ({', '.join(others)}): vLLM does not start when two answer, and "
            "this package's own for CPUs steps aside.",
            f"Uninstall it, or set {FILTER}={','.join([wanted, *general])}.",
        )
    if kind == CPU and "empty" not in release and here.version("vllm"):
        return ok(f"vLLM {release} is built for a device and names its own platform.")
    if wanted not in names:
        if wanted in [p.name for p in here.entry_points(cpu_platform.GROUP)]:
            why, install = f"{FILTER} leaves {wanted} out", _filter_remedy(here, OURS, wanted)
        else:
            why = "no package names it"
        return failed(f"vLLM gets no {title} platform: {why}.", install)
    if kind == ASCEND:
        return ok(f"vLLM's platform is {ASCENDS}, of vllm-ascend; there is no second one.")
    if reasons := cpu_platform.objections(here.root):
        remedy = "NPU_GPTOSS_PLATFORM=cpu asks for the CPU on a machine with an accelerator."
        return failed(f"This package names no CPU platform to vLLM: {'; '.join(reasons)}.", remedy)
    return ok(f"{cpu_platform.NAME} names vLLM's own CPU platform; there is no second one.")


def registration(here: Machine) -> Finding:
    """Loads vLLM with its plugins in a separate process and reads its platform and model class."""
    kind = here.platform()[0]
    if entry.version_objection(here.vllm) or OURS not in (p.name for p in loaded(here, GENERAL)):
        return not_applicable("The plugin would not register anything: see above.")
    rerun = f"Run `python -m {REGISTERED}` to see more."
    try:
        run = subprocess.run(
            [sys.executable, "-m", REGISTERED], capture_output=True, text=True, timeout=LIMIT, env=dict(here.environ)
        )
        found = json.loads(run.stdout.strip().splitlines()[-1]) if run.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return failed(f"Loading vLLM with its plugins did not end within {LIMIT} s.", rerun)
    if found is None:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return failed(f"vLLM does not load with its plugins (exit code {run.returncode}): {one_line(last)}", rerun)
    device, model = found["device"], found["model"]
    wanted = DEVICE_TYPES[kind]
    if device != wanted:
        sentence = f"vLLM takes this machine for {device or 'no platform'}, expected {wanted}."
        return failed(sentence, "Do as the checks of platform and plugins say.")
    ours = releases.here()
    if wanted in ours.devices and model != ours.model:
        sentence = f"vLLM would run {model} for {entry.ARCHITECTURE}, not {ours.model}: another plugin replaces it."
        return failed(sentence, f"Leave the other plugin out with {FILTER}, or uninstall it.")
    return ok(f"vLLM runs on {device}; {entry.ARCHITECTURE} is {model}.")
