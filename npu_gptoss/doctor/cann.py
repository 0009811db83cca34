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
    install = (
        f"Install CANN {here.release.cann.recommended} (toolkit, the 910B kernels, NNAL), or run in a container: "
        f"{_image(here.release)}."
    )
    if place is None:
        yield failed("No CANN toolkit is installed where it usually lies, nor named by ASCEND_HOME_PATH.", install)
        return
    if not text:
        yield failed(
            f"{variable} names {place}, which holds no CANN toolkit.",
            "`source /usr/local/Ascend/ascend-toolkit/set_env.sh` in the shell that starts the server.",
        )
        return
    yield _verdict(text, place, install, here)
    if variable is None:
        yield failed(
            f"CANN {text} lies in {place}, but this shell does not know it (ASCEND_HOME_PATH is not set), so torch-npu "
            "will not find its libraries.",
            f"`source {_script(place)}` in the shell that starts the server.",
        )


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
        return failed(
            f"{named} is older than {first}, the first whose attention operator takes gpt-oss's sinks.", install
        )
    if version.series == lowest.series and version.prerelease:
        return failed(
            f"{named} is an alpha build: its attention operator fails on sinks (learnable_sink), as 8.3.RC1.alpha003 "
            "was seen to; the release of the same name works.",
            install,
        )
    release = f"{version.series[0]}.{version.series[1]}.{version.release}"
    if release in row.cann.releases and not version.prerelease:
        if release == row.cann.recommended or here.emulated:
            return ok(f"{named}.")
        return warning(
            f"{named} may serve; {row.cann.recommended} came later, and what was mended in the operators since "
            "can only be there.",
            f"Where you are free to choose, take {row.cann.recommended}: {_image(row)}.",
        )
    if here.emulated:
        return ok(f"{named}: emulated, to see what its rules refuse.")
    if fits := between(version.series):
        return failed(f"{named}: this package serves on none of that series. {fits}.", _what_fits())
    return warning(
        f"{named} is not one of {', '.join(row.cann.releases)}, for which torch-npu {row.torch_npu.recommended} "
        "and this package's operator calls are made.",
        install,
    )


def _what_fits() -> str:
    stacks = [
        f"CANN {row.cann.recommended} with vllm-ascend {row.vllm_ascend.recommended} and torch-npu "
        f"{row.torch_npu.recommended} (`cann:{row.image}`)"
        for row in ASCEND_RELEASES
    ]
    return f"Use {', or '.join(stacks)}; a container has it beside the CANN of the host, and needs only its driver."


@on_ascend("NNAL", emulated=False)
def nnal(here: Machine) -> Finding:
    install = f"Install Ascend-cann-nnal of CANN's own version and `source {NNAL}/set_env.sh`."
    named = here.environ.get(ATB_VARIABLE, "")
    folder = Path(named).parents[1] if named else here.path(f"{NNAL}/latest")
    text = installed.value(installed.read(folder / "version.info"), "Ascend-cann-atb", ":")
    if not text:
        return failed(
            f"NNAL is not installed ({folder / 'version.info'} says no version): without its libatb.so torch-npu has "
            "no operator that writes the KV cache.",
            install,
        )
    if not named:
        return failed(
            f"NNAL {text} lies in {folder}, but this shell does not know it ({ATB_VARIABLE} is not set), so libatb.so "
            "will not be found.",
            f"`source {_script(folder.parent)}` after CANN's set_env.sh.",
        )
    if not (Path(named) / "lib/libatb.so").is_file():
        return failed(f"{ATB_VARIABLE} names {named}, which has no lib/libatb.so.", install)
    cann = find_toolkit(here)[2]
    ours, theirs = parse(text), parse(cann)
    if ours is None or theirs is None or (ours.series, ours.release) != (theirs.series, theirs.release):
        return warning(
            f"NNAL {text} is not of the version of CANN ({cann or 'unknown'}), and both share libraries.", install
        )
    return ok(f"NNAL {text}.")


@on_ascend("Ascend driver", emulated=False)
def driver(here: Machine) -> Finding:
    folder = here.path(DRIVER_FOLDER)
    text = installed.driver_version(here.root)
    cann, (named, oldest) = here.release.cann.releases[0], here.release.driver
    mount = f"in a container, mount {DRIVER_FOLDER}/version.info and {DRIVER_FOLDER}/lib64 of the host into it"
    if not text and not (folder / "lib64").is_dir():
        return failed(
            f"There is no Ascend driver in {DRIVER_FOLDER}.",
            f"Install the driver and firmware (Ascend HDK {named}); {mount}.",
        )
    release = installed.series(text)
    if release is None:
        return warning(
            f"The driver's version is not known ({text or 'no version.info'}).",
            f"Compare it with `npu-smi info` on the host; {mount}.",
        )
    if release < oldest:
        return warning(
            f"The driver {text} is older than what users report with CANN {cann} "
            f"({oldest[0]}.{oldest[1]} on); it may refuse to capture graphs (error 207000).",
            f"Upgrade to Ascend HDK {named}, which is known with CANN {cann}, or serve with --enforce-eager.",
        )
    return ok(f"Driver {text}.")


@on_ascend("device files of a 910B", emulated=False)
def device_files(here: Machine) -> Finding:
    cards = here.device_files("davinci[0-9]*")
    wanted = [*cards, *(here.path(f"/dev/{name}") for name in COMMON_DEVICE_FILES)]
    missing = ([] if cards else ["davinci0"]) + [path.name for path in wanted if not path.exists()]
    give = "start the container with --device /dev/davinci<n> and " + ", ".join(
        f"--device /dev/{name}" for name in COMMON_DEVICE_FILES
    )
    if missing:
        return failed(
            f"Not there: {', '.join(f'/dev/{name}' for name in missing)}.",
            f"On the host, see whether `npu-smi info` lists the cards (else: driver); {give}.",
        )
    closed = [path.name for path in wanted if not os.access(path, os.R_OK | os.W_OK)]
    if closed:
        return failed(
            f"This user may not open {', '.join(f'/dev/{name}' for name in closed)}.",
            "Add the user to the group of the driver (HwHiAiUser), or start the container with that group.",
        )
    visible = here.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    chosen = f" ASCEND_RT_VISIBLE_DEVICES={visible} chooses among them." if visible else ""
    if visible and not _can_be_chosen(visible, len(cards)):
        return failed(
            f"ASCEND_RT_VISIBLE_DEVICES={visible} cannot be met: CANN counts the cards in /dev from 0, here to "
            f"{len(cards) - 1}, and wants them in ascending order.",
            "Name cards by these counts, not by the numbers of the host: "
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
