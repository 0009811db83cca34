"""Detects the machine (Ascend, CUDA or CPU) from files and installed modules, without opening a device.

Opening a device in the wrong process breaks vLLM's workers (CUDA after fork, an NPU context in the API server), and a
laptop must be able to list and explain every kernel.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path

from npu_gptoss import envs
from npu_gptoss.errors import InputError

KINDS = ("ascend", "cuda", "cpu")
DEVICE_TYPES = {"ascend": "npu", "cuda": "cuda", "cpu": "cpu"}

# Python modules that kernels may ask for as features.
FEATURE_MODULES = ("torch_npu", "triton")
# Operators that not every wheel of torch_npu has, found as text of the file that lists its operators.
GATING_V2 = "npu_moe_gating_top_k_softmax_v2"
OPERATORS, LISTED = (GATING_V2,), "op_plugin/meta/_meta_registrations.py"
# A feature, too: the module `triton` where it is Triton-Ascend's, which has a folder more.
TRITON_FOR_ASCEND = "triton_ascend"

Architecture = tuple[int, int] | str  # CUDA's compute capability, or the name of Ascend's SoC


@dataclass(frozen=True)
class Platform:
    """kind: one of KINDS. features: names of installed packages and operators that kernels ask for.

    arch: None where it is unknown before the device is opened. releases: (module, release) of compilers.
    """

    kind: str
    features: frozenset[str] = frozenset()
    arch: Architecture | None = None
    releases: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            known = ", ".join(KINDS)
            raise InputError(f"there is no platform {self.kind!r}; expected one of {known}", field="platform")

    @property
    def device_type(self) -> str:
        """The type of torch device on which this platform computes: npu, cuda or cpu."""
        return DEVICE_TYPES[self.kind]


# Rounding to float8_e4m3fn in Triton: from compute capability 8.9 on. Its interpreter loses the carry of the mantissa.
FP8_STORES, FP8_SINCE = ("fp8_stores",), (8, 9)
# What `kernels explain --platform` stands for: a machine with the supported stack of that kind.
SUPPORTED = {
    "ascend": Platform("ascend", frozenset({"torch_npu"})),
    "cuda": Platform("cuda", frozenset({"triton", *FP8_STORES}), (9, 0), (("triton", "3.6.0"),)),
    "cpu": Platform("cpu"),
}


@dataclass(frozen=True)
class Capability:
    """A kernel's requirements of the machine: one of `platforms` (empty: any), all of `features`, and where they are
    stated one of `archs` and, of each compiler in `releases`, one of the releases (as "3.6", whatever follows)."""

    platforms: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    archs: tuple[Architecture, ...] = ()
    releases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        *platforms: str,
        features: tuple[str, ...] = (),
        archs: tuple[Architecture, ...] = (),
        releases: Mapping[str, tuple[str, ...]] | None = None,
    ) -> Capability:
        for kind in platforms:
            Platform(kind)
        return cls(frozenset(platforms), frozenset(features), archs, dict(releases or {}))

    def reasons_against(self, platform: Platform) -> list[str]:
        """The reasons against this machine, each a clause; empty when it fits."""
        reasons = []
        if self.platforms and platform.kind not in self.platforms:
            reasons.append(f"runs on {' or '.join(sorted(self.platforms))}; this is {platform.kind}")
        missing = sorted(self.features - platform.features)
        if missing:
            reasons.append(f"needs {', '.join(missing)}, which is not installed")
        if self.archs and platform.arch not in self.archs:
            wanted = " or ".join(map(_arch_name, self.archs))
            got = "is not known" if platform.arch is None else f"is {_arch_name(platform.arch)}"
            reasons.append(f"needs the architecture {wanted}; this machine's {got}")
        here = dict(platform.releases)
        for compiler, wanted in self.releases.items():
            got = here.get(compiler)
            if got is None or not any(f"{got}.".startswith(f"{release}.") for release in wanted):
                reasons.append(f"needs {compiler} {' or '.join(wanted)}, got {got or 'none'}")
        return reasons


def _arch_name(arch: Architecture) -> str:
    return arch if isinstance(arch, str) else ".".join(map(str, arch))


ANYWHERE = Capability()
ASCEND = Capability.of("ascend", features=("torch_npu",))
EMULATED_FP32 = ("emulated_fp32",)  # float32 in the place of bfloat16: no hardware does it, the emulated 910B on demand
TRITON = Capability.of("cuda", features=("triton",))
TRITON_ASCEND = Capability.of("ascend", features=("torch_npu", TRITON_FOR_ASCEND))
# Gluon is experimental: our kernels in it were seen working with these releases of Triton and are used with no others.
HOPPER = Capability.of("cuda", features=("triton",), archs=((9, 0),), releases={"triton": ("3.6", "3.8", "3.9")})


def _file_of(module: str) -> Path | None:
    """Returns the file that its import would run, to be read instead: an import takes long. None: not installed."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # a half-installed parent package
        return None
    return Path(spec.origin) if spec is not None and spec.origin else None


def _operators(torch_npu: Path) -> frozenset[str]:
    """Returns those of OPERATORS that torch_npu lists."""
    listed = torch_npu.parent / LISTED
    text = listed.read_text(encoding="utf-8") if listed.is_file() else ""
    return frozenset(name for name in OPERATORS if f'"{name}"' in text)


def _release(triton: Path) -> str | None:
    try:
        text = triton.read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"^__version__ = ['\"]([^'\"]+)['\"]", text, re.M)
    return found[1] if found else None


def cuda_architecture() -> tuple[int, int] | None:
    """torch's answer once CUDA is initialised, else the driver library's, which opens no device. None: not known, GPUs
    of several architectures, or Triton's interpreter, which is none."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        return None
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.get_device_capability()
    return _architecture_by_nvml()


@functools.cache
def _architecture_by_nvml() -> tuple[int, int] | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    try:
        count, found = ctypes.c_uint(), set()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return None
        for index in range(count.value):
            device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            if nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
                return None
            if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)):
                return None
            found.add((major.value, minor.value))
        return found.pop() if len(found) == 1 else None
    finally:
        nvml.nvmlShutdown()


def detect(root: Path = Path("/")) -> Platform:
    """Detects the platform from device files under `root` and installed modules; NPU_GPTOSS_PLATFORM overrides."""
    files = {name: file for name in FEATURE_MODULES if (file := _file_of(name))}
    features, release = frozenset(files), None
    if triton := files.get("triton"):
        release = _release(triton)
        if (triton.parent / "backends/ascend").is_dir():
            features |= {TRITON_FOR_ASCEND}
    if torch_npu := files.get("torch_npu"):
        features |= _operators(torch_npu)
    if envs.get("ASCEND_EMULATOR_FP32"):
        features |= {"emulated_fp32"}
    kind = "ascend" if envs.get("ASCEND_EMULATOR") else envs.get("NPU_GPTOSS_PLATFORM")
    if not kind:
        device_files = root / "dev"
        if "torch_npu" in features and any(device_files.glob("davinci[0-9]*")):
            kind = "ascend"
        elif any(device_files.glob("nvidia[0-9]*")):
            kind = "cuda"
        else:
            kind = "cpu"
    return Platform(kind, features, releases=(("triton", release),) if release else ())


_detected = functools.cache(detect)
_override: ContextVar[Platform | None] = ContextVar("platform_override", default=None)


def current_platform() -> Platform:
    """The override in force, else what `detect` found at the first call in this process, with the GPU's architecture as
    soon as it is known."""
    return _override.get() or _with_architecture(_detected())


def _with_architecture(platform: Platform) -> Platform:
    if platform.kind != "cuda":
        return platform
    arch = cuda_architecture()
    rounds = arch is not None and arch >= FP8_SINCE
    return replace(platform, arch=arch, features=platform.features | set(FP8_STORES if rounds else ()))


@contextmanager
def platform_override(platform: str | Platform, features: frozenset[str] | None = None) -> Iterator[Platform]:
    """Selects kernels for another machine of this kind, with the features, compilers and GPU of this one.

    features: instead of those that are here; then nothing else is known of the machine.
    """
    if isinstance(platform, str):
        kind = platform
        platform = Platform(kind, features or frozenset())
        if features is None:
            platform = _with_architecture(replace(_detected(), kind=kind))
    token = _override.set(platform)
    try:
        yield platform
    finally:
        _override.reset(token)
