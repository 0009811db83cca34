"""The Python packages against the supported window."""

from __future__ import annotations

import re
from collections.abc import Iterator

from npu_gptoss import plugin
from npu_gptoss.doctor import cann
from npu_gptoss.doctor.findings import Finding, failed, not_applicable, ok, warning
from npu_gptoss.doctor.machine import ASCEND, CPU, PLATFORM_VARIABLE, PLATFORMS, Machine
from npu_gptoss.serving.ascend import limits
from npu_gptoss.serving.lines import TORCH_OLDEST, here, silent_defect

LINE = here()
SET_UP = "`make setup` in a checkout of npu-gptoss sets everything up"
INSTALL_VLLM = "install its source release with VLLM_TARGET_DEVICE=empty (scripts/setup/install_vllm.py does)"
NAMES = {"ascend": "an Ascend", "cuda": "a CUDA", "cpu": "a CPU"}


def machine(here: Machine) -> Iterator[Finding]:
    named = here.environ.get(PLATFORM_VARIABLE, "")
    platform, why = here.platform()
    if named and named not in PLATFORMS:
        yield failed(
            "machine",
            f"{PLATFORM_VARIABLE}={named} names no platform, and every selection of a kernel will say so.",
            f"Unset it, or set it to one of {', '.join(PLATFORMS)}.",
        )
        return
    emulated = " It is emulated: real packages, no NPU." if here.emulated else ""
    yield ok("machine", f"This is {NAMES[platform]} machine: {why}.{emulated}")


def python(here: Machine) -> Iterator[Finding]:
    release = ".".join(map(str, here.python))
    minor = ".".join(map(str, here.python[:2]))
    ascend = here.platform()[0] == ASCEND
    if minor in (LINE.python_on_ascend if ascend else LINE.python):
        yield ok("python", f"Python {release}.")
    elif ascend and minor in LINE.python and here.python < (3, 12):
        yield warning(
            "python",
            f"Python {release}: vllm-ascend {LINE.vllm_ascend.recommended} has wheels for it, but everything here is "
            f"tested on {LINE.python_on_ascend[0]}.",
            f"Use Python {LINE.python_on_ascend[0]}.",
        )
    elif ascend:
        yield failed(
            "python",
            f"Python {release}: vllm-ascend {LINE.vllm_ascend.recommended} has no wheel for it.",
            f"Make the environment with Python {LINE.python_on_ascend[0]}.",
        )
    elif here.python[:2] < tuple(map(int, LINE.python[0].split("."))):
        yield failed(
            "python", f"Python {release} is older than {LINE.python[0]}.", f"Use Python {' or '.join(LINE.python)}."
        )
    else:
        yield warning(
            "python",
            f"Python {release} is newer than what is tested ({', '.join(LINE.python)}).",
            f"Use Python {LINE.python[1]} when something does not install.",
        )


def numbers(release: str) -> tuple[int, ...]:
    """(2, 7, 1) of "2.7.1.post2+cpu"; () when it starts with no number."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()


def torch(here: Machine) -> Iterator[Finding]:
    release = here.version("torch")
    if here.platform()[0] == ASCEND:
        recommended = LINE.torch.recommended
        remedy = f"Install torch {recommended}: `pip install torch=={recommended}` (on x86_64 its CPU build)."
        if release is None:
            yield failed("torch", "torch is not installed.", remedy)
        elif LINE.torch.has(release):
            yield ok("torch", f"torch {release}.")
        else:
            yield failed(
                "torch",
                f"torch {release}: torch-npu {LINE.torch_npu.recommended} is compiled against torch {recommended} and "
                "does not load with another.",
                remedy,
            )
        return
    oldest = ".".join(map(str, TORCH_OLDEST))
    if release is None:
        yield failed("torch", "torch is not installed, and nothing here computes without it.", f"{SET_UP}.")
    elif numbers(release) < TORCH_OLDEST:
        yield failed("torch", f"torch {release} is older than {oldest}.", f'`pip install "torch>={oldest}"`.')
    else:
        yield ok("torch", f"torch {release}.")


def torch_npu(here: Machine) -> Iterator[Finding]:
    if here.platform()[0] != ASCEND:
        yield not_applicable("torch-npu", "torch-npu is for Ascend machines.")
        return
    release = here.version("torch-npu") or here.version("torch_npu")
    remedy = f"`pip install torch-npu=={LINE.torch_npu.recommended}`."
    if release is None:
        yield failed("torch-npu", "torch-npu is not installed, so torch knows no NPU.", remedy)
    elif LINE.torch_npu.has(release):
        yield ok("torch-npu", f"torch-npu {release}.")
    elif (post := re.match(r"\d+\.\d+\.\d+\.post(\d+)", release)) and int(post[1]) > 1 and cann.series(here) == (8, 3):
        yield failed(
            "torch-npu",
            f"torch-npu {release} on CANN 8.3: it is made for CANN 8.5 or later, and names operators that have no "
            "kernel there (npu_clipped_swiglu is one).",
            remedy,
        )
    elif numbers(release)[:3] == numbers(LINE.torch_npu.recommended):
        yield warning(
            "torch-npu",
            f"torch-npu {release} is not one of {', '.join(LINE.torch_npu.releases)}, which are made for CANN 8.3 "
            "(.post2 is made for CANN 8.5, .dev builds are older than the operator with sinks).",
            remedy,
        )
    else:
        yield failed(
            "torch-npu",
            f"torch-npu {release}: vllm-ascend {LINE.vllm_ascend.recommended} rides on torch-npu "
            f"{LINE.torch_npu.recommended}.",
            remedy,
        )


def vllm(here: Machine) -> Iterator[Finding]:
    platform, release = here.platform()[0], here.vllm
    remedy = f"For vLLM {LINE.vllm.recommended}, {INSTALL_VLLM}."
    if release is None:
        sentence = "vLLM is not installed, so there is no `vllm serve`"
        if platform == ASCEND:
            yield failed("vllm", f"{sentence}.", remedy)
        else:
            yield warning("vllm", f"{sentence}; the offline engine (`npu-gptoss generate`) works without it.", remedy)
        return
    objection = plugin.version_objection(release)
    build = release.partition("+")[2]
    if objection:
        sentence, _, rest = objection.partition(". Install")
        yield failed("vllm", f"{sentence}.", f"Install{rest}" if rest else remedy)
    elif platform in (ASCEND, CPU) and "empty" not in build and "cpu" not in build:
        state = warning if platform == ASCEND else failed
        yield state(
            "vllm",
            f"vLLM {release} is not the build without a device (`+empty`): it comes with operators and a torch of "
            "another platform.",
            remedy,
        )
    else:
        yield ok("vllm", f"vLLM {release}.")


def vllm_ascend(here: Machine) -> Iterator[Finding]:
    if here.platform()[0] != ASCEND:
        yield not_applicable("vllm-ascend", "vllm-ascend is for Ascend machines.")
        return
    release = here.vllm_ascend
    remedy = f"`pip install vllm-ascend=={LINE.vllm_ascend.recommended}`."
    if release is None:
        yield failed("vllm-ascend", "vllm-ascend is not installed, so vLLM knows no Ascend platform.", remedy)
    elif objection := limits.version_objection(release):
        defect = silent_defect(numbers(release))
        alone = f" Without this package's model gpt-oss is answered wrongly there, without a word: it {defect}."
        yield failed("vllm-ascend", f"{objection}.{alone if defect else ''}", remedy)
    else:
        yield ok("vllm-ascend", f"vllm-ascend {release}.")
