"""The Python packages against the supported window."""

from __future__ import annotations

import re
from collections.abc import Iterator

from npu_gptoss import plugin
from npu_gptoss.doctor import cann
from npu_gptoss.doctor.findings import Finding, failed, ok, on_ascend, warning
from npu_gptoss.doctor.machine import ASCEND, CPU, CUDA, DEVICE_TYPES, PLATFORM_VARIABLE, PLATFORMS, Machine
from npu_gptoss.serving.ascend import limits
from npu_gptoss.serving.releases import TORCH_OLDEST, own_version, release_of, seams, silent_defect

SET_UP = "`make setup` in a checkout of npu-gptoss sets everything up"
INSTALL_VLLM = "install its source release with VLLM_TARGET_DEVICE=empty (docs/installation.md)"
OTHER_WHEELS = {"0.11": " (.post2 is made for CANN 8.5, .dev builds are older than the operator with sinks)"}
FASTAPI_OLDEST = (0, 115)  # required by both vLLMs
NAMES = {"ascend": "an Ascend", "cuda": "a CUDA", "cpu": "a CPU"}


def machine(here: Machine) -> Finding:
    named = here.environ.get(PLATFORM_VARIABLE, "")
    platform, why = here.platform()
    if named and named not in PLATFORMS:
        remedy = f"Unset it, or set it to one of {', '.join(PLATFORMS)}."
        return failed(f"{PLATFORM_VARIABLE}={named} names no platform: no kernel can be selected.", remedy)
    emulated = " It is emulated: real packages, no NPU." if here.emulated else ""
    return ok(f"This is {NAMES[platform]} machine: {why}.{emulated}")


def python(here: Machine) -> Finding:
    row = here.release
    release = ".".join(map(str, here.python))
    minor = ".".join(map(str, here.python[:2]))
    ascend = here.platform()[0] == ASCEND
    tested = row.python_on_ascend if ascend else row.python
    if minor in tested:
        return ok(f"Python {release}.")
    use = f"Use Python {tested[len(tested) // 2]}."
    if ascend:
        wheels = f"vllm-ascend {row.vllm_ascend.recommended} has wheels for {', '.join(tested)} only"
        return failed(f"Python {release}: {wheels}.", use)
    if here.python[:2] < tuple(map(int, tested[0].split("."))):
        return failed(f"Python {release} is older than {tested[0]}.", use)
    return warning(f"Python {release} is newer than the tested releases ({', '.join(tested)}).", use)


def numbers(release: str) -> tuple[int, ...]:
    """(2, 7, 1) of "2.7.1.post2+cpu"; () when it starts with no number."""
    match = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(map(int, match[0].split("."))) if match else ()


def torch(here: Machine) -> Finding:
    row = here.release
    release = here.version("torch")
    if here.platform()[0] == ASCEND:
        remedy = f"`pip install torch=={row.torch.recommended}` (on x86_64 its CPU build)."
        if release is None:
            return failed("torch is not installed.", remedy)
        if row.torch.has(release):
            return ok(f"torch {release}.")
        needs = f"torch-npu {row.torch_npu.recommended} loads with torch {row.torch.recommended} only"
        return failed(f"torch {release}: {needs}.", remedy)
    oldest = ".".join(map(str, TORCH_OLDEST))
    if release is None:
        return failed("torch is not installed, and nothing here computes without it.", f"{SET_UP}.")
    if numbers(release) < TORCH_OLDEST:
        return failed(f"torch {release} is older than {oldest}.", f'`pip install "torch>={oldest}"`.')
    return ok(f"torch {release}.")


@on_ascend("torch-npu")
def torch_npu(here: Machine) -> Finding:
    row = here.release
    release = here.version("torch-npu")
    remedy = f"`pip install torch-npu=={row.torch_npu.recommended}`."
    if release is None:
        return failed("torch-npu is not installed, so torch knows no NPU.", remedy)
    if row.torch_npu.has(release):
        return ok(f"torch-npu {release}.")
    if (post := re.match(r"\d+\.\d+\.\d+\.post(\d+)", release)) and int(post[1]) > 1 and cann.series(here) == (8, 3):
        missing = "which has no kernel for some of its operators (npu_clipped_swiglu)"
        return failed(f"torch-npu {release} is made for CANN 8.5 or later, and this is 8.3, {missing}.", remedy)
    if numbers(release)[:3] == numbers(row.torch_npu.recommended):
        made = f"{', '.join(row.torch_npu.releases)}, which are made for CANN {row.cann.releases[0]}"
        return warning(f"torch-npu {release} is not one of {made}{OTHER_WHEELS.get(row.name, '')}.", remedy)
    needs = f"vllm-ascend {row.vllm_ascend.recommended} needs torch-npu {row.torch_npu.recommended}"
    return failed(f"torch-npu {release}: {needs}.", remedy)


def vllm(here: Machine) -> Iterator[Finding]:
    yield _vllm(here)
    fastapi = here.version("fastapi")
    if fastapi is not None and numbers(fastapi) < FASTAPI_OLDEST:
        oldest = ".".join(map(str, FASTAPI_OLDEST))
        remedy = (
            f'`pip install "fastapi>={oldest},<0.124" "uvicorn[standard]"`, or use the lock (docs/running-on-910b.md).'
        )
        yield failed(f"fastapi {fastapi} is older than {oldest}, and vLLM's server does not start with it.", remedy)


def _vllm(here: Machine) -> Finding:
    platform, release, wanted = here.platform()[0], here.vllm, here.release.vllm.recommended
    remedy = f"For vLLM {wanted}, {INSTALL_VLLM}."
    if platform == CUDA:
        remedy = f"`pip install vllm=={wanted}`, or `make serve` in a checkout of npu-gptoss, which sets it up."
    if release is None:
        sentence = "vLLM is not installed, so there is no `vllm serve`"
        if platform == ASCEND:
            return failed(f"{sentence}.", remedy)
        return warning(f"{sentence}; the offline engine (`npu-gptoss generate`) works without it.", remedy)
    objection = plugin.version_objection(release)
    build = release.partition("+")[2]
    if objection:
        sentence, _, rest = objection.partition(". Install")
        return failed(f"{sentence}.", f"Install{rest}" if rest else remedy)
    served, device = release_of(release), DEVICE_TYPES[platform]
    if device not in served.devices:
        state, stays = (warning, ": gpt-oss stays vLLM's own here") if platform == CUDA else (failed, "")
        where = f"{' and '.join(served.devices)} under it, not on {device}{stays}"
        return state(f"vLLM {release}: this package serves on {where}.", remedy)
    if platform in (ASCEND, CPU) and "empty" not in build and "cpu" not in build:
        state = warning if platform == ASCEND else failed
        return state(f"vLLM {release} is no `+empty` build: it has operators and a torch of another platform.", remedy)
    return ok(f"vLLM {release}.")


@on_ascend("vllm-ascend")
def vllm_ascend(here: Machine) -> Iterator[Finding]:
    row = here.release
    release = here.vllm_ascend
    remedy = f"`pip install vllm-ascend=={row.vllm_ascend.recommended}`."
    if release is None:
        yield failed("vllm-ascend is not installed, so vLLM knows no Ascend platform.", remedy)
    elif objection := limits.version_objection(release, row, here.package):
        defect = "" if ".dev" in release else silent_defect(numbers(release))  # a build's number says nothing
        alone = f" Without this package's model gpt-oss is answered wrongly there, without an error: it {defect}."
        yield failed(f"{objection}.{alone if defect else ''}", remedy)
    elif lost := seams.misfits(row, here.package) if here.package(seams.PACKAGE) else ():
        why = "; ".join(misfit.sentence for misfit in lost)
        yield warning(f"vllm-ascend {release}: this package leaves repairs of it out, because {why}.", remedy)
    else:
        like = f", which has what this package uses of {row.vllm_ascend.recommended}"
        built = seams.device_type(here.package(seams.PACKAGE))
        device = f", built for {built}" if built else ""
        yield ok(f"vllm-ascend {release}{device}{'' if row.vllm_ascend.has(release) else like}.")
    yield from _triton_ascend(here)
    wanted, set_to = row.vllm.recommended, here.environ.get("VLLM_VERSION", "")
    given = set_to or own_version(here.package("vllm")) or wanted
    if row.asks_vllm and given != wanted:
        asked = "VLLM_VERSION" if set_to else "vllm.__version__"
        yield failed(
            f"{asked} is {given}, beside vLLM {here.vllm}: vllm-ascend {row.asks_vllm}.",
            f"`export VLLM_VERSION={wanted}` in the shell that starts the server; scripts/serve.sh does.",
        )


def _triton_ascend(here: Machine) -> Iterator[Finding]:
    """The emulated 910B has a step's kernels without it."""
    wanted, release = here.release.triton_ascend, here.version("triton-ascend")
    if here.emulated or wanted.has(release) or (release is None and not here.release.launches_triton):
        return
    remedy = f"{limits.triton_remedy(here.release, here.python)}."
    if release is None:
        why = f"vLLM {here.release.vllm.recommended} launches a Triton kernel in every step"
        yield failed(f"triton-ascend is not installed: {why}, so the first request ends the server.", remedy)
    else:
        of = f"{', '.join(wanted.releases)}, which are for CANN {here.release.cann.recommended}"
        yield warning(f"triton-ascend {release} is not one of {of}.", remedy)
