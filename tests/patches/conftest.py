"""Where the released vllm-ascend is: 0.11.0 in the environment of the emulated 910B, 0.23.0 from pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from ascend_emulator.launch import EmulationError, find_venv


@pytest.fixture(scope="session", autouse=True)
def git() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed; the diffs are applied with `git apply`")


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The environment of the emulated 910B."""
    try:
        return find_venv()
    except EmulationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def ascend_site(emulated: Path) -> Path:
    """Where the released vllm-ascend is installed."""
    (package,) = emulated.glob("lib/python3*/site-packages/vllm_ascend")
    (release,) = package.parent.glob("vllm_ascend-*.dist-info")
    if release.name != "vllm_ascend-0.11.0.dist-info":
        pytest.skip(f"the emulated environment has {release.name}; the diffs are for 0.11.0")
    return package.parent


@pytest.fixture(scope="session")
def newest_ascend(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the Python files of vllm-ascend 0.23.0, unpacked from its wheel."""
    folder = tmp_path_factory.mktemp("vllm-ascend-0.23.0")
    tags = ("--only-binary", ":all:", "--python-version", "3.11", "--platform", "manylinux_2_34_x86_64")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", *tags, "-d", str(folder)]
    try:
        done = subprocess.run([*command, "vllm-ascend==0.23.0"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("pip got no wheel of vllm-ascend 0.23.0 within two minutes")
    if done.returncode:
        pytest.skip(f"pip has no wheel of vllm-ascend 0.23.0: {done.stderr.strip()[-200:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".py")])
    wheel.unlink()
    return folder
