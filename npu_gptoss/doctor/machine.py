"""The machine for the checks: files, environment variables, installed packages. Tests make one up."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from npu_gptoss import cann
from npu_gptoss.serving import releases
from npu_gptoss.serving.releases import RELEASES, Release

ASCEND, CUDA, CPU = "ascend", "cuda", "cpu"
PLATFORMS = (ASCEND, CUDA, CPU)
DEVICE_TYPES = {ASCEND: "npu", CUDA: "cuda", CPU: "cpu"}  # their names in torch and vLLM
PLATFORM_VARIABLE = "NPU_GPTOSS_PLATFORM"
EMULATED_VARIABLE = "ASCEND_EMULATOR"
GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """root: of the file system. version, entry_points: look up installed packages. package: the folder of one."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, int, int] = sys.version_info[:3]
    version: Callable[[str], str | None] = releases.installed
    package: Callable[[str], Path | None] = releases.package_folder
    entry_points: Callable[[str], Sequence[EntryPoint]] = lambda group: entry_points(group=group)

    @property
    def emulated(self) -> bool:
        return self.environ.get(EMULATED_VARIABLE, "") not in ("", "0")

    @property
    def vllm(self) -> str | None:
        return releases.find_vllm(self.version)

    @property
    def vllm_ascend(self) -> str | None:
        return self.version("vllm-ascend")

    @property
    def release(self) -> Release:
        """The release that this machine is compared with: by its vLLM, else by its CANN, else the first for its
        device."""
        device = DEVICE_TYPES[self.platform()[0]]
        fitting = [row for row in RELEASES if device in row.devices]
        place, _ = cann.find_toolkit(self.environ, self.root)
        of_cann = releases.release_of_cann(cann.series(cann.toolkit_version(place))) if place else None
        return next((line for line in (releases.release_of(self.vllm), of_cann) if line in fitting), fitting[0])

    def device_files(self, pattern: str) -> list[Path]:
        return sorted((self.root / "dev").glob(pattern))

    def path(self, absolute: str) -> Path:
        """A place of the file system, below `root`."""
        return self.root / absolute.lstrip("/")

    def platform(self) -> tuple[str, str]:
        """The platform that this machine serves on, and the reason. Kernel selection needs more, such as torch_npu.

        A driver's device files or vllm-ascend make it an Ascend machine even while the rest of the stack is missing.
        """
        if self.emulated:
            return ASCEND, "ascend-emulate says so"
        named = self.environ.get(PLATFORM_VARIABLE, "")
        if named in PLATFORMS:
            return named, f"{PLATFORM_VARIABLE}={named} says so"
        if devices := self.device_files("davinci[0-9]*"):
            return ASCEND, f"/dev/{devices[0].name} is there"
        for package in ("vllm-ascend", "torch-npu"):
            if self.version(package):
                return ASCEND, f"{package} is installed"
        if devices := self.device_files("nvidia[0-9]*"):
            return CUDA, f"/dev/{devices[0].name} is there"
        return CPU, "there is no /dev/davinci*, no /dev/nvidia*, and vllm-ascend is not installed"


@dataclass(frozen=True)
class Device:
    """The device that the probe opened. kind: npu, cuda or cpu. total, free: bytes of one device's memory; of RAM on a
    CPU. mxfp4: kernels here compute with a checkpoint's MXFP4 experts without expanding them."""

    kind: str
    name: str
    count: int
    total: int
    free: int
    emulated: bool = False
    mxfp4: bool = False
