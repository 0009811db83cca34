"""Runs the tests of repairs on vLLM 0.23, in the environment of the emulated 910B's second stack."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ascend_emulator.launch import Machine, environment

from emulator.tests.machine import venv
from tests.serving.compat.of_release import ON_0_23

ROOT = Path(__file__).resolve().parents[3]

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize(
    ("chosen", "least"),
    [
        ("not emulated and not (slow or long)", 800),
        pytest.param("not emulated and (slow or long)", 3, marks=pytest.mark.long),
    ],
    ids=["short ones", "long ones"],
)
def test_the_tests_of_release_0_23_pass(chosen: str, least: int) -> None:
    machine = Machine("9.1")
    place = venv(machine)
    others = ("admission/test_fields.py", "openai/test_ledger.py", "releases/test_releases.py", "test_window_blocks.py")
    files = [f"tests/serving/{name}" for name in (*(f"compat/{name}" for name in ON_0_23), *others)]
    command = [str(place / "bin/python"), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", chosen, *files]
    variables = environment(machine, place) | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "needs vLLM 0.23" not in done.stdout, "a file was skipped"
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) >= least
