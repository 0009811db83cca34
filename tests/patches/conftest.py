"""Where the released packages are: vLLM beside the tests, vllm-ascend in the environment of the emulated 910B."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
from pathlib import Path

import pytest

from npu_gptoss.emulator.launch import EmulationError, find_venv


def need_git() -> None:
    if shutil.which("git") is None:
        pytest.skip("git is not installed; the diffs are applied with `git apply`")


@pytest.fixture(scope="session")
def site() -> Path:
    """Where the released vLLM is installed."""
    need_git()
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vllm is not installed")
    version = importlib.metadata.version("vllm")
    if version.partition("+")[0] != "0.11.0":
        pytest.skip(f"vllm is {version}; the diffs are for 0.11.0")
    return Path(spec.origin).parents[1]


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The environment of the emulated 910B."""
    need_git()
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
