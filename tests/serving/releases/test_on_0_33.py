"""Runs the tests that need vLLM 0.33 in an environment that has it; none of their files may be skipped there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.setup.environments import ENVIRONMENTS
from tests.serving.compat.of_release import ON_0_33

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ENVIRONMENTS["vllm033"].folder / "bin/python"
NEEDED = "needs vLLM 0.33"  # the reason with which each of these files is skipped
FILES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "tests").rglob("test_*.py")
    if NEEDED in path.read_text() and "pytest.mark.cuda" not in path.read_text() and path != Path(__file__)
)

pytestmark = [
    pytest.mark.vllm033,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="vLLM 0.33 is not set up; make test"),
]


def run(python: Path | str, *files: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    no_gpu = {"CUDA_VISIBLE_DEVICES": ""}  # else vLLM leaves Triton out, which interprets its kernels here
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | no_gpu)


@pytest.mark.parametrize(
    ("chosen", "least"),
    [("not emulated and not long", 900), pytest.param("not emulated and long", 1, marks=pytest.mark.long)],
    ids=["short ones", "long ones"],
)
def test_the_tests_of_release_0_33_pass_without_a_skipped_file(chosen: str, least: int) -> None:
    others = [*(f"tests/serving/compat/{name}" for name in ON_0_33), "tests/serving/releases/test_releases.py"]
    # of the front end's tests, the one with anthropic's types, which this environment alone has
    others.append("tests/frontend/test_messages.py::test_an_answer_is_no_message_of_anthropics_sdk")
    done = run(PYTHON, "-m", chosen, *FILES, *others)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert NEEDED not in done.stdout
    assert "needs triton" not in done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least


def test_the_tests_of_a_gpu_are_collected_with_vllm_0_33() -> None:
    """`make test-cuda` ended before its first test: it could not import other releases' files, nor the emulator."""
    found = run(PYTHON, "--collect-only", "-m", "cuda")
    assert found.returncode == 0, found.stdout[-3000:]
    assert int(re.search(r"(\d+)/\d+ tests collected", found.stdout)[1]) > 400
