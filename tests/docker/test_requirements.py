"""What the images install is what was tested, with a hash for each machine; scripts/setup/lock_images.py writes it."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

from scripts.setup import lock_images
from scripts.setup.lock_images import Image, LockError, images, render
from scripts.setup.setup_venv import read_pins

ROOT = Path(__file__).resolve().parents[2]
A, B = "a" * 64, "b" * 64


def read(path: Path) -> list[tuple[str, str, str, list[str]]]:
    """(name, version, marker, hashes) of each requirement."""
    text = path.read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = []
    for line in lines:
        match = re.fullmatch(r"([\w.-]+)==(\S+)(?: ; (\S+ == \S+))?((?: +--hash=sha256:[0-9a-f]{64})+)", line.rstrip())
        assert match, line
        found.append((match[1], match[2], match[3] or "", match[4].split()))
    return found


@pytest.mark.parametrize("image", images(), ids=lambda image: image.name)
def test_an_image_installs_the_versions_that_the_tests_ran_with(image: Image) -> None:
    written = read(image.path)
    versions = {name: version.partition("+")[0] for name, version, _, _ in written}
    assert {name: versions.get(name) for name in image.pins} == dict(image.pins)
    assert versions["torch"] == image.torch
    if image.closed:
        assert set(versions) == {*image.pins, "torch"}


@pytest.mark.parametrize("image", images(), ids=lambda image: image.name)
def test_torch_is_the_build_without_cuda_unless_cuda_is_wanted(image: Image) -> None:
    entries = [(version, marker) for name, version, marker, _ in read(image.path) if name == "torch"]
    if image.cpu_build:
        assert entries == [
            (image.torch, 'platform_machine == "aarch64"'),
            (f"{image.torch}+cpu", 'platform_machine == "x86_64"'),
        ]
    else:
        assert entries == [(image.torch, "")]
    nvidia = [name for name, *_ in read(image.path) if name.startswith("nvidia-")]
    assert bool(nvidia) != image.cpu_build


def test_the_emulated_910b_and_the_image_differ_in_nothing_but_tests_and_the_wheels() -> None:
    emulated = set(read_pins(ROOT / "requirements/emulated.txt"))
    image = {name for name, *_ in read(ROOT / "requirements/910b.txt")}
    assert emulated - image == lock_images.ONLY_FOR_TESTS
    assert image - emulated == {"torch", "torch-npu", "vllm-ascend"}


def test_one_wheel_for_all_machines_has_one_hash_and_others_have_each_their_own() -> None:
    x86_64 = {"p": ("1", A), "q": ("2", A), "t": ("3+cpu", A)}
    aarch64 = {"p": ("1", A), "q": ("2", B), "t": ("3", B)}
    lines = render(images()[0], {"x86_64": x86_64, "aarch64": aarch64}).splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        "p==1 \\",
        f"    --hash=sha256:{A}",
        "q==2 \\",
        f"    --hash=sha256:{A} \\",
        f"    --hash=sha256:{B}",
        't==3 ; platform_machine == "aarch64" \\',
        f"    --hash=sha256:{B}",
        't==3+cpu ; platform_machine == "x86_64" \\',
        f"    --hash=sha256:{A}",
    ]


def test_a_version_that_the_index_lacks_is_an_error_with_pips_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    image = Image("x", "x", {"numpy": "0.0.1"}, "2.7.1")
    with pytest.raises(LockError, match=r"x on aarch64 cannot be resolved\. pip says:\n.*numpy==0\.0\.1"):
        lock_images.resolve(image, "aarch64")


def wheel(folder: Path, version: str) -> None:
    name = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{name}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{name}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}/RECORD", "")


def test_a_cpu_build_that_pip_finds_here_does_not_get_into_the_cuda_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for version in ("9.0", "9.0+cpu"):
        wheel(tmp_path, version)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)  # a machine's constraints may name another torch
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    image = Image("x", "x", {}, "9.0", machines=("x86_64",), cpu_build=False, closed=False)
    assert lock_images.resolve(image, "x86_64")["torch"][0] == "9.0"
