"""Whether vLLM finds this package: entry points, their order, the filter VLLM_PLUGINS, and one platform only.

vLLM 0.11.0 loads every entry point of `vllm.general_plugins` in the order in which packages are installed; the last to
register a model wins. Of `vllm.platform_plugins` one may answer, a second is an error.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint

from npu_gptoss import plugin as entry
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, one_line, warning
from npu_gptoss.doctor.machine import ASCEND, CPU, CUDA, Machine
from npu_gptoss.serving import platform as cpu_platform

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


def discovered(here: Machine) -> Iterator[Finding]:
    if here.vllm is None:
        yield not_applicable("plugin", "vLLM, which would load it, is not installed.")
        return
    installed = [p for p in here.entry_points(GENERAL) if p.name == OURS]
    if not installed:
        yield failed("plugin", f"vLLM does not find the plugin: no package names {OURS} in {GENERAL}.", REINSTALL)
    elif all(p.value != VALUE for p in installed):
        yield failed(
            "plugin",
            f"The plugin {OURS} that vLLM finds is {installed[0].value} of {_origin(installed[0])}, not {VALUE}.",
            f"Uninstall {_origin(installed[0])}. {REINSTALL}",
        )
    elif OURS not in (p.name for p in loaded(here, GENERAL)):
        yield failed(
            "plugin",
            f"{FILTER}={here.environ[FILTER]} leaves {OURS} out: vLLM would serve gpt-oss without sinks and biases, or "
            "not at all.",
            _filter_remedy(here, OURS),
        )
    else:
        yield ok("plugin", f"vLLM finds the plugin {OURS} ({installed[0].value}).")


def order(here: Machine) -> Iterator[Finding]:
    plugins = loaded(here, GENERAL) if here.vllm else []
    names = [p.name for p in plugins]
    if OURS not in names:
        yield not_applicable("plugin-order", "The plugin is not loaded.")
        return
    behind = [p for p in plugins[names.index(OURS) + 1 :] if _origin(p) not in KNOWN]
    listed = f"vLLM loads, in this order: {', '.join(names)}."
    if behind:
        others = ", ".join(f"{p.name} of {_origin(p)}" for p in behind)
        keep = [name for name in names if name not in {p.name for p in behind}]
        keep += [p.name for p in loaded(here, cpu_platform.GROUP)]
        yield warning(
            "plugin-order",
            f"{listed} What comes after {OURS} ({others}) and registers {entry.ARCHITECTURE} replaces it.",
            f"See below what vLLM ends up with; {FILTER}={','.join(keep)} leaves the others out.",
        )
    else:
        yield ok("plugin-order", listed)


def platforms(here: Machine) -> Iterator[Finding]:
    kind = here.platform()[0]
    release = here.vllm
    if release is None:
        yield not_applicable("platform-plugin", "vLLM is not installed.")
        return
    names = [p.name for p in loaded(here, cpu_platform.GROUP)]
    installed = [p.name for p in here.entry_points(cpu_platform.GROUP)]
    others = [name for name in names if name not in (ASCENDS, cpu_platform.NAME)]
    alone = f"{FILTER}=" + ",".join([ASCENDS if kind == ASCEND else cpu_platform.NAME, *_general_names(here)])
    if others and kind != CUDA:
        yield warning(
            "platform-plugin",
            f"A second platform plugin is installed ({', '.join(others)}), and vLLM takes one: with two that answer it "
            "does not start, and this package's own for CPUs steps aside. See registration for what comes of it.",
            f"Uninstall it, or set {alone}.",
        )
    elif kind == ASCEND and ASCENDS not in names:
        filtered = ASCENDS in installed
        yield failed(
            "platform-plugin",
            f"vLLM gets no Ascend platform: {f'{FILTER} leaves {ASCENDS} out' if filtered else 'no package names it'}.",
            _filter_remedy(here, OURS, ASCENDS) if filtered else "Install vllm-ascend into the environment of vLLM.",
        )
    elif kind == ASCEND:
        yield ok("platform-plugin", f"vLLM's platform is {ASCENDS}, of vllm-ascend; there is no second one.")
    elif kind == CUDA:
        yield ok("platform-plugin", "On CUDA the platform and gpt-oss are vLLM's own; this package mends its defects.")
    elif "empty" not in release and here.version("vllm"):
        yield ok("platform-plugin", f"vLLM {release} is built for a device and names its own platform.")
    elif cpu_platform.NAME not in names:
        filtered = cpu_platform.NAME in installed
        why = f"{FILTER} leaves {cpu_platform.NAME} out" if filtered else "no package names one"
        yield failed(
            "platform-plugin",
            f"vLLM gets no CPU platform: {why}.",
            _filter_remedy(here, OURS, cpu_platform.NAME) if filtered else REINSTALL,
        )
    elif reasons := cpu_platform.objections(here.root):
        yield failed(
            "platform-plugin",
            f"This package names no CPU platform to vLLM: {'; '.join(reasons)}.",
            "Remove what stands there; NPU_GPTOSS_PLATFORM=cpu asks for the CPU on a machine with an accelerator.",
        )
    else:
        yield ok("platform-plugin", f"{cpu_platform.NAME} names vLLM's own CPU platform; there is no second one.")


def _general_names(here: Machine) -> list[str]:
    return [p.name for p in here.entry_points(GENERAL) if _origin(p) in KNOWN]


def registration(here: Machine) -> Iterator[Finding]:
    """Loads vLLM with its plugins in a process of its own and looks what it would run."""
    kind = here.platform()[0]
    if entry.version_objection(here.vllm) or OURS not in (p.name for p in loaded(here, GENERAL)):
        yield not_applicable("registration", "The plugin would not register anything: see above.")
        return
    try:
        run = subprocess.run(
            [sys.executable, "-m", REGISTERED], capture_output=True, text=True, timeout=LIMIT, env=dict(here.environ)
        )
        found = json.loads(run.stdout.strip().splitlines()[-1]) if run.returncode == 0 else None
    except subprocess.TimeoutExpired:
        yield failed(
            "registration",
            f"Loading vLLM with its plugins did not end within {LIMIT} s.",
            f"Run `python -m {REGISTERED}` to see where it hangs.",
        )
        return
    if found is None:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        yield failed(
            "registration",
            f"vLLM does not load with its plugins (exit code {run.returncode}): {one_line(last)}",
            f"Run `python -m {REGISTERED}` to see the whole error.",
        )
        return
    device, model = found["device"], found["model"]
    wanted = {ASCEND: "npu", CPU: "cpu", CUDA: "cuda"}[kind]
    if device != wanted:
        yield failed(
            "registration",
            f"vLLM takes this machine for {device or 'no platform'}, expected {wanted}.",
            "Mend what the checks of platform and plugins say; the server's log names the platform at its start.",
        )
    elif kind != CUDA and model != entry.MODEL:
        yield failed(
            "registration",
            f"vLLM would run {model} for {entry.ARCHITECTURE}, not {entry.MODEL}: another plugin replaces it.",
            f"Leave the other plugin out with {FILTER}, or uninstall it.",
        )
    else:
        yield ok("registration", f"vLLM runs on {device}; {entry.ARCHITECTURE} is {model}.")
