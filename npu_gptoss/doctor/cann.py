"""Checks the CANN toolkit, its NNAL package, the driver and its device files.

Reads their version files, without loading a library (`npu_gptoss.cann`; of NNAL here): `nnal/atb/latest/version.info`
with `Ascend-cann-atb : 8.3.RC1`; its `set_env.sh` sets ATB_HOME_PATH to `nnal/atb/latest/atb/cxx_abi_<n>`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from npu_gptoss import cann as installed
from npu_gptoss.cann import parse
from npu_gptoss.doctor.findings import Finding, failed, ok, on_ascend, warning
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.releases import ASCEND_RELEASES, Release, between

ATB_VARIABLE = "ATB_HOME_PATH"
NNAL = "/usr/local/Ascend/nnal/atb"
DRIVER_FOLDER = f"/{installed.DRIVER_FOLDER}"
COMMON_DEVICE_FILES = ("davinci_manager", "devmm_svm", "hisi_hdc")


def find_toolkit(here: Machine) -> tuple[Path | None, str | None, str]:
    """(the toolkit, the variable that names it, its version), as `npu_gptoss.cann` finds them."""
    place, variable = installed.find_toolkit(here.environ, here.root)
    return place, variable, installed.toolkit_version(place) if place else ""


def series(here: Machine) -> tuple[int, int] | None:
    """(8, 3) of CANN 8.3.RC2; None where none is found or its version cannot be read."""
    return installed.series(find_toolkit(here)[2])


def _script(folder: Path) -> Path:
    """The set_env.sh of this folder."""
    return next((f / "set_env.sh" for f in (folder, folder.parent) if (f / "set_env.sh").is_file()), folder)


@on_ascend("CANN")
def toolkit(here: Machine) -> Iterator[Finding]:
    place, variable, text = find_toolkit(here)
    release = here.release.cann.recommended
    install = f"Install CANN {release} (toolkit, 910B kernels, NNAL), or use a container: {_image(here.release)}."
    in_the_shell = "in the shell that starts the server."
    if place is None:
        elsewhere = f"Where one lies elsewhere, `source` its set_env.sh {in_the_shell} Else: {install}"
        yield failed("No CANN toolkit is installed where it usually lies, nor named by ASCEND_HOME_PATH.", elsewhere)
        return
    if not text:
        script = "/usr/local/Ascend/ascend-toolkit/set_env.sh"
        yield failed(f"{variable} names {place}, which holds no CANN toolkit.", f"`source {script}` {in_the_shell}")
        return
    yield _verdict(text, place, install, here)
    if variable is None:
        lost = f"CANN {text} lies in {place}, but torch-npu will not find it: ASCEND_HOME_PATH is not set."
        yield failed(lost, f"`source {_script(place)}` {in_the_shell}")


def _image(row: Release) -> str:
    return f"the image `cann:{row.image}` has it"


def _verdict(text: str, place: Path, install: str, here: Machine) -> Finding:
    version, row = parse(text), here.release
    named = f"CANN {text} ({place})"
    first = ASCEND_RELEASES[0].cann.releases[0]
    lowest = parse(first)
    if wrong := installed.defect(text, installed.built(place)):
        return failed(f"{named} is {wrong}.", install)
    if version is None:
        return warning(f"{named}: this is no version that can be compared.", install)
    if version.series < lowest.series:
        return failed(f"{named} is older than {first}, the first whose attention operator takes sinks.", install)
    if version.series == lowest.series and version.prerelease:
        return failed(f"{named} is an alpha build: its attention operator fails on sinks (learnable_sink).", install)
    release = f"{version.series[0]}.{version.series[1]}.{version.release}"
    if release in row.cann.releases and not version.prerelease:
        if release == row.cann.recommended or here.emulated:
            return ok(f"{named}.")
        remedy = f"Where you are free to choose, take {row.cann.recommended}: {_image(row)}."
        return warning(f"{named} may serve; {row.cann.recommended} has later repairs of its operators.", remedy)
    if here.emulated:
        return ok(f"{named}: emulated, to see what its rules refuse.")
    if fits := between(version.series):
        return failed(f"{named}: this package serves on none of that series. {fits}.", _what_fits())
    made_for = f"for which torch-npu {row.torch_npu.recommended} and this package's operator calls are made"
    return warning(f"{named} is not one of {', '.join(row.cann.releases)}, {made_for}.", install)


def _what_fits() -> str:
    stacks = [
        f"CANN {row.cann.recommended} with vllm-ascend {row.vllm_ascend.recommended} and torch-npu "
        f"{row.torch_npu.recommended} (`cann:{row.image}`)"
        for row in ASCEND_RELEASES
    ]
    return f"Use {', or '.join(stacks)}; a container has its own CANN and needs only the host's driver."


@on_ascend("NNAL", emulated=False)
def nnal(here: Machine) -> Finding:
    install = f"Install Ascend-cann-nnal of CANN's own version and `source {NNAL}/set_env.sh`."
    named = here.environ.get(ATB_VARIABLE, "")
    folder = Path(named).parents[1] if named else here.path(f"{NNAL}/latest")
    text = installed.value(installed.read(folder / "version.info"), "Ascend-cann-atb", ":")
    if not text:
        return failed(f"NNAL is not installed in {folder}: torch-npu writes the KV cache with its libatb.so.", install)
    if not named:
        remedy = f"`source {_script(folder.parent)}` after CANN's set_env.sh."
        return failed(f"NNAL {text} lies in {folder}, but will not be found: {ATB_VARIABLE} is not set.", remedy)
    if not (Path(named) / "lib/libatb.so").is_file():
        return failed(f"{ATB_VARIABLE} names {named}, which has no lib/libatb.so.", install)
    cann = find_toolkit(here)[2]
    ours, theirs = parse(text), parse(cann)
    if ours is None or theirs is None or (ours.series, ours.release) != (theirs.series, theirs.release):
        return warning(f"NNAL {text} is not of the version of CANN ({cann or 'unknown'}); both share files.", install)
    return ok(f"NNAL {text}.")


@on_ascend("Ascend driver", emulated=False)
def driver(here: Machine) -> Finding:
    folder = installed.driver_folder(here.root)
    text = installed.driver_version(here.root)
    cann, (named, oldest) = here.release.cann.releases[0], here.release.driver
    mount = f"in a container, mount {DRIVER_FOLDER}/version.info and {DRIVER_FOLDER}/lib64 of the host into it"
    if not text and not (folder / "lib64").is_dir():
        install = f"Install the driver and firmware (Ascend HDK {named}); {mount}."
        return failed(f"There is no Ascend driver in {DRIVER_FOLDER}.", install)
    release = installed.series(text)
    if release is None:
        found = text or "no version.info"
        return warning(f"The driver's version is not known ({found}).", f"Read it by `npu-smi info`; {mount}.")
    if release < oldest:
        return warning(
            f"The driver {text} is older than {oldest[0]}.{oldest[1]}, the oldest for CANN {cann}; it may refuse to "
            "capture graphs (error 207000).",
            f"Upgrade to Ascend HDK {named}, or serve with --enforce-eager.",
        )
    return ok(f"Driver {text}.")


@on_ascend("device files of a 910B", emulated=False)
def device_files(here: Machine) -> Finding:
    cards = here.device_files("davinci[0-9]*")
    wanted = [*cards, *(here.path(f"/dev/{name}") for name in COMMON_DEVICE_FILES)]
    missing = ([] if cards else ["davinci0"]) + [path.name for path in wanted if not path.exists()]
    if missing:
        give = " ".join(f"--device /dev/{name}" for name in ("davinci<n>", *COMMON_DEVICE_FILES))
        return failed(
            f"Not there: {', '.join(f'/dev/{name}' for name in missing)}.",
            f"See whether `npu-smi info` lists the cards on the host (else: driver); start the container with {give}.",
        )
    if closed := [f"/dev/{path.name}" for path in wanted if not os.access(path, os.R_OK | os.W_OK)]:
        group = "Add the user to the group of the driver (HwHiAiUser), or start the container with that group."
        return failed(f"This user may not open {', '.join(closed)}.", group)
    visible = here.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    chosen = f" ASCEND_RT_VISIBLE_DEVICES={visible} chooses among them." if visible else ""
    if visible and not _can_be_chosen(visible, len(cards)):
        return failed(
            f"ASCEND_RT_VISIBLE_DEVICES={visible} is impossible: CANN counts the cards in /dev from 0, here to "
            f"{len(cards) - 1}, in ascending order.",
            f"ASCEND_RT_VISIBLE_DEVICES={','.join(map(str, range(len(cards))))} is all of them.",
        )
    return ok(f"{len(cards)} card{'s' if len(cards) > 1 else ''} in /dev, open to this user.{chosen}")


def _can_be_chosen(visible: str, cards: int) -> bool:
    """CANN takes this value of ASCEND_RT_VISIBLE_DEVICES: the rules of its error EE1001, by reports of users."""
    numbers = visible.split(",")
    if not all(re.fullmatch(r" *\d+ *", number) for number in numbers):
        return False
    chosen = [int(number) for number in numbers]
    return chosen == sorted(set(chosen)) and chosen[-1] < cards
