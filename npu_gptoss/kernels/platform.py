"""What machine this is: Ascend, CUDA or CPU, told from files and installed modules without opening a device.

Opening a device in the wrong process breaks vLLM's workers (CUDA after fork, an NPU context in the API server), and a
laptop must be able to list and explain every kernel.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path

from npu_gptoss import envs
from npu_gptoss.errors import InputError

KINDS = ("ascend", "cuda", "cpu")
DEVICE_TYPES = {"ascend": "npu", "cuda": "cuda", "cpu": "cpu"}

# Python modules that kernels may ask for as features.
FEATURE_MODULES = ("torch_npu", "triton")


@dataclass(frozen=True)
class Platform:
    """kind: one of KINDS. features: names of what is installed, as kernels ask for them."""

    kind: str
    features: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InputError(f"there is no platform {self.kind!r}; expected one of {', '.join(KINDS)}")

    @property
    def device_type(self) -> str:
        """The type of torch device on which this platform computes: npu, cuda or cpu."""
        return DEVICE_TYPES[self.kind]


@dataclass(frozen=True)
class Capability:
    """What a kernel needs of the machine: one of `platforms` (empty: any) and all of `features`."""

    platforms: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()

    @classmethod
    def of(cls, *platforms: str, features: tuple[str, ...] = ()) -> Capability:
        for kind in platforms:
            Platform(kind)
        return cls(frozenset(platforms), frozenset(features))

    def reasons_against(self, platform: Platform) -> list[str]:
        """Why this machine does not do, each a clause; empty when it does."""
        reasons = []
        if self.platforms and platform.kind not in self.platforms:
            reasons.append(f"runs on {' or '.join(sorted(self.platforms))}; this is {platform.kind}")
        missing = sorted(self.features - platform.features)
        if missing:
            reasons.append(f"needs {', '.join(missing)}, which is not installed")
        return reasons


ANYWHERE = Capability()


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a half-installed parent package
        return False


def detect(root: Path = Path("/")) -> Platform:
    """Tells the platform from device files under `root` and installed modules; NPU_GPTOSS_PLATFORM overrides."""
    features = frozenset(name for name in FEATURE_MODULES if _installed(name))
    if envs.get("NPU_GPTOSS_EMULATED_FP32"):
        features |= {"emulated_fp32"}
    kind = envs.get("NPU_GPTOSS_PLATFORM")
    if not kind:
        device_files = root / "dev"
        if "torch_npu" in features and any(device_files.glob("davinci[0-9]*")):
            kind = "ascend"
        elif any(device_files.glob("nvidia[0-9]*")):
            kind = "cuda"
        else:
            kind = "cpu"
    return Platform(kind, features)


_detected = functools.cache(detect)
_override: ContextVar[Platform | None] = ContextVar("platform_override", default=None)


def current_platform() -> Platform:
    """The override in force, else what `detect` found at the first call in this process."""
    return _override.get() or _detected()


@contextmanager
def platform_override(kind: str, features: frozenset[str] | None = None) -> Iterator[Platform]:
    """Selects kernels as if on another machine. Features default to the detected ones."""
    here = _detected()
    platform = replace(here, kind=kind, features=here.features if features is None else features)
    token = _override.set(platform)
    try:
        yield platform
    finally:
        _override.reset(token)
