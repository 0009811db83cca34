"""What Ascend hands out, as made-up machines: the doctor and the start of a server are right on each.

The files of vllm-ascend are those of the emulated environments' wheels; builds change a few lines of them.
docs/doctor.md has the same table.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from ascend_emulator.launch import Machine as Emulated

from emulator.tests.machine import venv
from npu_gptoss import plugin
from npu_gptoss.doctor import memory
from npu_gptoss.doctor.checks import QUICK
from npu_gptoss.doctor.findings import guarded
from npu_gptoss.doctor.machine import Machine
from npu_gptoss.serving.ascend import limits
from npu_gptoss.serving.releases import ASCEND_RELEASES, own_version, seams
from tests.doctor.machines import ASCEND_9_1_PACKAGES, ASCEND_PACKAGES, ascend, write
from tests.doctor.test_cann import install_driver, install_nnal, install_toolkit
from tests.markdown import ROOT

pytestmark = pytest.mark.emulated

STACKS = {"0.11": Emulated(), "0.23": Emulated("9.1")}
PACKAGES = {"0.11": ASCEND_PACKAGES, "0.23": ASCEND_9_1_PACKAGES | {"triton-ascend": "3.2.2"}}
RUNNER, DISPATCHER = "worker/model_runner_v1.py", "ops/fused_moe/token_dispatcher.py"
Edits = Mapping[str, tuple[str, str]]  # file -> text and its replacement


def installed(release: str, package: str) -> Path:
    (folder,) = venv(STACKS[release]).glob(f"lib/python3.*/site-packages/{package}")
    return folder


def build(release: str, place: Path, edits: Edits) -> Path:
    """A vllm-ascend of links to the wheel's files, and of changed ones."""
    target = shutil.copytree(installed(release, "vllm_ascend"), place / "vllm_ascend", copy_function=os.symlink)
    for name, (old, new) in edits.items():
        text = (target / name).read_text()
        assert old in text, f"{name} has no {old}"
        (target / name).unlink()
        write(target / name, text.replace(old, new))
    return target


@dataclass(frozen=True)
class Given:
    """One row. state: of the check `check`; all others are well. said: in its sentence."""

    name: str
    release: str = "0.23"
    python: tuple[int, int, int] = (3, 12, 11)
    cann: str = "9.1.0"
    driver: str = "25.5.1"
    packages: Mapping[str, str] = field(default_factory=dict)
    edits: Edits = field(default_factory=dict)
    findings: Mapping[str, str] = field(default_factory=dict)  # check -> state, of those that are not well
    said: str = ""  # in one of them
    starts: bool = True


OTHER = {"vllm": "failed", "torch": "failed", "torch-npu": "failed", "vllm-ascend": "failed", "cann": "failed"}
ON_8_3 = {"release": "0.11", "python": (3, 11, 13), "cann": "8.3.RC2", "driver": "25.3.rc1"}
A3 = {"_build_info.py": ("'A2'", "'A3'")}
MOVED = {DISPATCHER: ("token_dispatch_input:", "dispatch_input:")}
RENAMED = {RUNNER: ("update_full_graph_params(", "update_graph_params(")}
MACHINES = (
    Given("image vllm-ascend:v0.23.0"),
    Given("image vllm-ascend:v0.23.0-a3", edits=A3, said="built for A3"),
    Given("0.23.0.post1, from source", packages={"vllm-ascend": "0.23.0.post1"}),
    Given("the tag v0.23.0, from a checkout", packages={"vllm-ascend": "0.23.1.dev0+g5cb98caaa"}),
    Given("nightly build with the same seams", packages={"vllm-ascend": "0.19.2.dev731+g0a1b2c3d4"}),
    Given(
        "nightly build with another dispatcher",
        packages={"vllm-ascend": "0.19.2.dev732+g0a1b2c3d4"},
        edits=MOVED,
        findings={"vllm-ascend": "failed"},
        said="TokenDispatcherWithAllGather.token_dispatch was expected to take token_dispatch_input",
        starts=False,
    ),
    Given(
        "nightly build with another update of graphs",
        packages={"vllm-ascend": "0.19.2.dev733+g0a1b2c3d4"},
        edits=RENAMED,
        findings={"vllm-ascend": "warning"},
        said="vllm_ascend.worker.model_runner_v1",
    ),
    Given("image cann:9.1.0-910b, Python 3.11, our lock", python=(3, 11, 13), packages={"triton-ascend": "3.2.0"}),
    Given("wheels on Python 3.10", python=(3, 10, 18), packages={"triton-ascend": "3.2.0"}),
    Given("Ascend HDK 25.2 below CANN 9.1", driver="25.2.0"),
    Given(
        "Ascend HDK 25.0 below CANN 9.1", driver="25.0.rc1.1", findings={"driver": "warning"}, said="older than 25.2"
    ),
    Given("image vllm-ascend:v0.11.0", **ON_8_3),
    Given("the same with Triton-Ascend 3.2.0rc4", **ON_8_3, packages={"triton-ascend": "3.2.0rc4"}),
    Given(
        "the same with Triton-Ascend 3.2.0",
        **ON_8_3,
        packages={"triton-ascend": "3.2.0"},
        findings={"vllm-ascend": "warning"},
        said="3.2.0rc4, which are for CANN 8.3.RC2",
    ),
    Given(
        "image vllm-ascend:v0.11.0rc1",
        **{**ON_8_3, "cann": "8.3.RC1"},
        packages={"vllm-ascend": "0.11.0rc1"},
        findings={"cann": "warning"},
        said="8.3.RC2 has later repairs",
    ),
    *(
        Given(
            f"image vllm-ascend:v{release}",
            release="",
            python=python,
            cann=version,
            packages={"vllm": f"{vllm}+empty", "vllm-ascend": release, "torch": torch, "torch-npu": torch},
            findings=OTHER | ({"python": "failed"} if python >= (3, 12) else {}),
            said=said,
            starts=False,
        )
        for release, vllm, torch, python, version, said in (
            ("0.13.0", "0.13.0", "2.8.0", (3, 11, 13), "8.5.0", "leaves out the attention sinks"),
            ("0.18.0", "0.18.0", "2.9.0", (3, 11, 13), "8.5.1", "another activation"),
            ("0.30.0rc2", "0.30.0", "2.11.0", (3, 12, 11), "9.2.0", "129 keys"),
        )
    ),
)
VERSIONS = ("python", "torch", "torch-npu", "vllm", "vllm-ascend", "cann", "nnal", "driver")
CHECKS = {name: QUICK[name] for name in VERSIONS} | {"graphs": lambda here: memory.graphs(here, None, 1, 16)}


def made(given: Given, root: Path) -> Machine:
    install_driver(root, given.driver)
    folders = {}
    if given.release:
        place = installed(given.release, "vllm_ascend")
        folders["vllm_ascend"] = build(given.release, root, given.edits) if given.edits else place
        folders["vllm"] = installed(given.release, "vllm")
    return ascend(
        root,
        {**PACKAGES.get(given.release, {}), **given.packages},
        python=given.python,
        folders=folders,
        ASCEND_HOME_PATH=str(install_toolkit(root / "cann", given.cann)),
        ATB_HOME_PATH=str(install_nnal(root, given.cann)),
    )


@pytest.mark.parametrize("given", MACHINES, ids=lambda given: given.name)
def test_what_ascend_hands_out_is_judged_rightly(given: Given, tmp_path: Path) -> None:
    here = made(given, tmp_path)
    found = [finding for name, check in CHECKS.items() for finding in guarded(name, check, here)]
    assert {f.check: f.state for f in found if f.state in ("warning", "failed")} == given.findings, found
    assert given.said in " ".join(finding.sentence for finding in found)
    objection = plugin.version_objection(here.vllm)
    objection = objection or limits.version_objection(here.vllm_ascend, here.release, here.package)
    assert (objection is None) is given.starts, objection
    if not given.starts and given.said.startswith("Token"):
        assert given.said in str(objection)


def test_page_has_the_same_table() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    for given in MACHINES:
        doctor = ", ".join(f"{name} {state}" for name, state in given.findings.items()) or "ok"
        row = f"| {given.name} | {doctor} | {'yes' if given.starts else 'no'} |"
        assert row in page, row


@pytest.mark.parametrize("release", STACKS)
def test_the_wheel_that_was_read_has_every_seam(release: str) -> None:
    row = next(row for row in ASCEND_RELEASES if row.name == release)
    assert seams.misfits(row, lambda name: installed(release, name)) == ()
    assert own_version(installed(release, "vllm")) == row.vllm.recommended, "its metadata have +empty"


def test_only_the_first_process_of_a_server_reads_the_files(tmp_path, monkeypatch) -> None:
    (row,) = (row for row in ASCEND_RELEASES if row.name == "0.23")
    monkeypatch.setenv(seams.FITS, "of another installation")
    for file, fits in (({"utils.py": ("def weak_ref_tensors(", "def other(")}, False), ({}, True)):
        folder = build("0.23", tmp_path / str(fits), file)

        def place(name: str, folder: Path = folder) -> Path | None:
            return folder if name == "vllm_ascend" else installed("0.23", name)

        monkeypatch.setattr(seams, "package_folder", place)
        assert (seams.misfits(row, place) == ()) is fits
        assert (str(folder) in os.environ[seams.FITS]) is fits
    seams.misfits.cache_clear()  # as in another process
    monkeypatch.setattr(seams, "Reader", None)
    assert seams.misfits(row, place) == ()


@pytest.mark.parametrize(
    ("file", "old", "new", "said", "needed"),
    [
        ("utils.py", "def weak_ref_tensors(", "def weak_tensors(", "vllm_ascend.utils.weak_ref_tensors is not", True),
        ("attention/utils.py", "class AscendCommonAttentionMetadata", "class Other", "AscendCommonAttention", True),
        (
            "attention/attention_v1.py",
            "    DecodeOnly =",
            "    Decode =",
            "AscendAttentionState.DecodeOnly is not",
            True,
        ),
        (
            "compilation/acl_graph.py",
            "    attn_params:",
            "    params:",
            "GraphParams was expected to take attn_p",
            True,
        ),
        ("compilation/acl_graph.py", "current_stream().synchronize()", "x()", "__call__ no longer contains", True),
        ("ops/fused_moe/moe_comm_method.py", "    routed_out:", "    out:", "FusedExpertsResult was expected", True),
        (RUNNER, "self.model = ACLGraphWrapper(", "self.model = Wrapper(", "load_model no longer contains", False),
        (RUNNER, "force_uniform_decode:", "uniform_decode:", "to take force_uniform_decode", False),
    ],
)
def test_a_changed_seam_is_named(file, old, new, said, needed, tmp_path) -> None:
    folder = build("0.23", tmp_path, {file: (old, new)})
    (row,) = (row for row in ASCEND_RELEASES if row.name == "0.23")
    found = seams.misfits(row, lambda name: folder if name == "vllm_ascend" else installed("0.23", name))
    assert [(said in misfit.sentence, misfit.needed) for misfit in found] == [(True, needed)], found
