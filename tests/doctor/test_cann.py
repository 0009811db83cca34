"""Version files as Huawei's installers write them, in a made-up root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from npu_gptoss.doctor import cann
from npu_gptoss.serving.ascend import limits
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ASCEND_PACKAGES, ascend, machine, only, write

CHECKS = (cann.toolkit, cann.nnal, cann.driver, cann.device_files)


def install_toolkit(folder: Path, version: str, arch: str = "aarch64") -> Path:
    write(
        folder / f"{arch}-linux/ascend_toolkit_install.info",
        f"package_name=Ascend-cann-toolkit\nversion={version}\ninnerversion=V100R001C23SPC002B210\n"
        f"compatible_version=[V100R001C15],[V100R001C23]\narch={arch}\nos=linux\npath={folder}/{arch}-linux\n",
    )
    return folder


def install_nnal(root: Path, version: str) -> Path:
    """Returns the value that its set_env.sh gives ATB_HOME_PATH."""
    latest = root / "usr/local/Ascend/nnal/atb/latest"
    write(
        latest / "version.info",
        f"    Ascend-cann-atb : {version}\n    Ascend-cann-atb Version : {version}.B030\n    Platform : aarch64\n"
        "    branch : br_release\n    commit id : 02a9\n",
    )
    write(latest / "atb/cxx_abi_1/lib/libatb.so")
    return latest / "atb/cxx_abi_1"


def install_driver(root: Path, version: str, folder: str = "usr/local/Ascend") -> None:
    write(
        root / folder / "driver/version.info",
        f"Version={version}\nascendhal_version=7.35.23\naicpu_version=1.0\nInnerversion=V100R001C23SPC002B212\n"
        f"compatible_version=[V100R001C19],[V100R001C23]\npackage_version={version}\n",
    )


@pytest.mark.parametrize(
    ("version", "packages", "state", "phrase"),
    [
        ("8.3.RC1", ASCEND_PACKAGES, "warning", "take 8.3.RC2"),
        ("8.3.RC2", ASCEND_PACKAGES, "ok", "CANN 8.3.RC2"),
        ("8.3.rc2", ASCEND_PACKAGES, "ok", "CANN 8.3.rc2"),
        ("8.3.RC1.alpha003", ASCEND_PACKAGES, "failed", "an alpha build: its attention operator fails on sinks"),
        ("8.3.RC2.alpha001", ASCEND_PACKAGES, "failed", "alpha build"),
        ("8.2.RC1.alpha003", ASCEND_PACKAGES, "failed", "older than 8.3.RC1, the first whose attention operator"),
        ("7.0.0", ASCEND_PACKAGES, "failed", "Install CANN 8.3.RC2"),
        ("8.3.RC3", ASCEND_PACKAGES, "warning", "not one of 8.3.RC1, 8.3.RC2"),
        ("8.5.0", ASCEND_PACKAGES, "failed", "leaves out the attention sinks"),
        ("8.5.1", ASCEND_PACKAGES, "failed", "CANN 9.1.0 with vllm-ascend 0.23.0 and torch-npu 2.10.0.post4"),
        ("9.0.1", ASCEND_PACKAGES, "failed", "CANN 8.3.RC2 with vllm-ascend 0.11.0 and torch-npu 2.7.1"),
        ("9.0.0", ASCEND_PACKAGES, "failed", "129 keys"),
        ("9.2.0", ASCEND_PACKAGES, "failed", "0.27.1rc1 to 0.30.0rc2"),
        ("9.3.0", ASCEND_PACKAGES, "warning", "not one of 8.3.RC1, 8.3.RC2"),
        *((text, ASCEND_PACKAGES, "warning", "no version that can be compared") for text in ("T63", "V100R001C23")),
        # compared with the stack above it
        ("9.1.0", ASCEND_9_1_PACKAGES, "ok", "CANN 9.1.0"),
        ("9.1.0", {}, "ok", "CANN 9.1.0"),  # nothing else is installed yet
        ("9.1.0", ASCEND_PACKAGES, "warning", "not one of 8.3.RC1, 8.3.RC2"),
        ("8.3.RC2", ASCEND_9_1_PACKAGES, "warning", "not one of 9.1.0"),
        ("9.1.0-beta.1", ASCEND_9_1_PACKAGES, "failed", "Install CANN 9.1.0"),
        ("9.1.0-beta.3", {}, "failed", "lose columns"),
        ("9.1.0.pre", ASCEND_9_1_PACKAGES, "ok", "CANN 9.1.0"),
    ],
)
def test_cann(tmp_path, version, packages, state, phrase):
    home = install_toolkit(tmp_path / "cann", version)
    write(tmp_path / "dev/davinci0")
    only(cann.toolkit(ascend(tmp_path, packages, ASCEND_HOME_PATH=str(home))), state, phrase)


@pytest.mark.parametrize(
    ("day", "wrong"), [("20260324", False), ("20260326", True), ("20260330", True), ("20260331", False), ("", False)]
)
def test_nightlies_named_like_the_release_are_found_by_their_day(tmp_path, monkeypatch, day, wrong):
    home = install_toolkit(tmp_path / "cann", "9.1.0")
    if day:
        text = f'#define OPS_TRANSFORMER_VERSION "9.1.0"\n#define OPS_TRANSFORMER_TIMESTAMP {day}000324948\n'
        write(home / "aarch64-linux/include/version/ops_transformer_version.h", text)
    here = ascend(tmp_path, ASCEND_9_1_PACKAGES, ASCEND_HOME_PATH=str(home))
    only(cann.toolkit(here), *(("failed", "2687bb676", "Install CANN 9.1.0") if wrong else ("ok",)))
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    refused = limits.cann_objection()
    assert (refused is not None) == wrong, "a server refuses what the doctor does"


def test_the_emulated_rc1_is_what_was_asked_for(tmp_path):
    home = install_toolkit(tmp_path / "cann", "8.3.RC1")
    only(cann.toolkit(ascend(tmp_path, ASCEND_HOME_PATH=str(home), ASCEND_EMULATOR="1")), "ok")


def test_toolkit_version_is_read_from_version_cfg_too(tmp_path):
    write(
        tmp_path / "cann/version.cfg",
        "# version: 1.0\nruntime_running_version=[7.8.0.1.231:8.3.RC1]\n"
        "toolkit_running_version=[7.8.0.1.231:8.3.RC1.alpha003]\n",
    )
    here = ascend(tmp_path, ASCEND_TOOLKIT_HOME=str(tmp_path / "cann"))
    only(cann.toolkit(here), "failed", "8.3.RC1.alpha003")


def test_toolkit_that_is_missing_or_unknown_to_the_shell_is_a_failure(tmp_path):
    only(cann.toolkit(ascend(tmp_path)), "failed", "No CANN toolkit", "Install CANN 8.3.RC2")
    here = ascend(tmp_path, ASCEND_HOME_PATH=str(tmp_path / "gone"))
    only(cann.toolkit(here), "failed", "ASCEND_HOME_PATH names", "gone", "set_env.sh")
    install_toolkit(tmp_path / "home/Ascend/cann", "8.3.RC2")
    latest = install_toolkit(tmp_path / "usr/local/Ascend/ascend-toolkit/latest", "8.3.RC2")
    script = write(latest.parent / "set_env.sh")
    first, second = cann.toolkit(ascend(tmp_path))
    assert first.state == "ok"
    only([second], "failed", "ASCEND_HOME_PATH is not set", f"`source {script}`")


def test_nnal_must_be_there_known_whole_and_of_canns_version(tmp_path):
    home = install_toolkit(tmp_path / "cann", "8.3.RC1")
    only(cann.nnal(ascend(tmp_path)), "failed", "NNAL is not installed", "Ascend-cann-nnal")
    atb = install_nnal(tmp_path, "8.3.RC1")
    here = ascend(tmp_path, ASCEND_HOME_PATH=str(home), ATB_HOME_PATH=str(atb))
    only(cann.nnal(here), "ok", "NNAL 8.3.RC1")
    only(cann.nnal(ascend(tmp_path)), "failed", "ATB_HOME_PATH is not set", "`source ")
    only(cann.nnal(ascend(tmp_path, ATB_HOME_PATH=str(atb))), "warning", "unknown")
    install_nnal(tmp_path, "8.2.RC1")
    only(cann.nnal(here), "warning", "NNAL 8.2.RC1 is not of the version of CANN (8.3.RC1)")
    (atb / "lib/libatb.so").unlink()
    only(cann.nnal(here), "failed", "no lib/libatb.so")


@pytest.mark.parametrize(
    ("info", "state", "phrase"),
    [
        ("package_version=25.3.rc1\n", "ok", "Driver 25.3.rc1"),
        ("Version=24.1.rc1\npackage_version=25.0.rc1.1\n", "ok", "25.0.rc1.1"),
        ("package_version=26.0.rc1\n", "ok", ""),
        ("package_version=24.1.rc2.2\n", "warning", "error 207000"),
        ("Version=24.1.rc1\nascendhal_version=7.35.19\n", "warning", "The driver 24.1.rc1 is older"),
        ("package_version=unknown\n", "warning", "not known (unknown)"),
        ("", "warning", "not known (no version.info)"),
        (None, "failed", "no Ascend driver"),
    ],
)
def test_driver(tmp_path, info, state, phrase):
    if info is not None:
        write(tmp_path / "usr/local/Ascend/driver/version.info", info)
        (tmp_path / "usr/local/Ascend/driver/lib64").mkdir(parents=True)
    only(cann.driver(ascend(tmp_path)), state, phrase)


def test_driver_in_another_folder_is_not_taken_for_none(tmp_path):
    write(tmp_path / "etc/ascend_install.info", "UserName=HwHiAiUser\nDriver_Install_Path_Param=/opt/Ascend\n")
    only(cann.driver(ascend(tmp_path)), "failed", "no Ascend driver")
    install_driver(tmp_path, "25.5.0")  # a container has it in the usual place
    only(cann.driver(ascend(tmp_path)), "ok", "25.5.0")
    install_driver(tmp_path, "25.5.1", "opt/Ascend")
    only(cann.driver(ascend(tmp_path)), "ok", "25.5.1")


def test_device_files(tmp_path, monkeypatch):
    only(cann.device_files(ascend(tmp_path)), "failed", "/dev/davinci0", "/dev/hisi_hdc", "--device /dev/davinci<n>")
    for name in ("davinci0", "davinci5", "davinci_manager", "devmm_svm"):
        write(tmp_path / "dev" / name)
    only(cann.device_files(ascend(tmp_path)), "failed", "Not there: /dev/hisi_hdc.")
    write(tmp_path / "dev/hisi_hdc")
    here = ascend(tmp_path, ASCEND_RT_VISIBLE_DEVICES="1")
    only(cann.device_files(here), "ok", "2 cards", "ASCEND_RT_VISIBLE_DEVICES=1")
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "davinci5")
    only(cann.device_files(here), "failed", "may not open /dev/davinci5.", "HwHiAiUser")


@pytest.mark.parametrize(
    ("visible", "state"),
    [
        *((right, "ok") for right in ("0", "0,1")),
        *((wrong, "failed") for wrong in ("5", "2", "1,0", "0,0", "0,", "all")),
    ],
)
def test_cards_that_cann_would_not_give_are_a_failure(tmp_path, visible, state):
    """In a container that sees davinci0 and davinci5 these are 0 and 1."""
    for name in ("davinci0", "davinci5", *cann.COMMON_DEVICE_FILES):
        write(tmp_path / "dev" / name)
    phrase = {"ok": "chooses among them", "failed": "ASCEND_RT_VISIBLE_DEVICES=0,1 is all of them"}[state]
    only(cann.device_files(ascend(tmp_path, ASCEND_RT_VISIBLE_DEVICES=visible)), state, phrase)


def test_cann_checks_apply_on_ascend_only_and_emulated_to_the_toolkit(tmp_path):
    for check in CHECKS:
        only(check(machine(tmp_path)), "not applicable")
    home = install_toolkit(tmp_path / "cann", "8.3.RC1", "x86_64")
    emulated = ascend(tmp_path, ASCEND_EMULATOR="1", ASCEND_HOME_PATH=str(home))
    for check, state in zip(CHECKS, ("ok", *["not applicable"] * 3), strict=True):
        only(check(emulated), state)
