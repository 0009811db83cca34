"""Where a number comes from: the machine and its driver, the versions, the commit, kernels chosen by hand."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from npu_gptoss import __version__, envs

PACKAGE = Path(__file__).resolve().parents[1]
UNKNOWN = "unknown"


def machine(device: torch.device) -> dict[str, Any]:
    """The name of the device that computed, its driver, and its host's processor."""
    found: dict[str, Any] = {"device": "CPU", "processor": platform.processor() or platform.machine()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {"device": properties.name, "memory_GB": round(properties.total_memory / 1e9, 1), "driver": driver()}
    elif device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_device_name(device)
    return found


def driver() -> str:
    """NVIDIA's, as nvidia-smi says it; "unknown" without one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return (_output(command) or UNKNOWN).splitlines()[0]


def versions() -> dict[str, str]:
    """Returns the versions of everything that a number depends on; `commit` as in `commit`."""
    found = {
        "npu_gptoss": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    for name in ("triton", "torch-npu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, str]:
    """The variables that are set and decide which kernels compute."""
    names = {"NPU_GPTOSS_DISABLE_PLUGINS", "NPU_GPTOSS_PLATFORM"}
    names |= {name for name in os.environ if name.startswith(envs.KERNEL_OVERRIDE_PREFIX)}
    return {name: os.environ[name] for name in sorted(names) if os.environ.get(name)}


def commit() -> str:
    """NPU_GPTOSS_COMMIT, else the commit of the checkout that holds this package; "unknown" without either.

    A checkout with changed tracked files gives "<commit>-dirty".
    """
    if named := envs.get("NPU_GPTOSS_COMMIT"):
        return named
    if not (PACKAGE.parent / ".git").exists():
        return UNKNOWN  # installed: a repository further up is another project
    command = ["git", "-C", str(PACKAGE.parent), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    return _output(command) or UNKNOWN


def _output(command: list[str]) -> str:
    """The command's output; empty if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
