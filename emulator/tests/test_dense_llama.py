"""The README's example: a stock vllm-ascend suite for a dense Llama passes on the emulated 910B."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from emulator.tests.machine import venv

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.long), "graphs"])
def test_a_stock_suite_passes_on_the_emulator(mode: str) -> None:
    place = venv()
    suite = ["pytest", "-q", "-p", "no:cacheprovider", "-k", mode, "--rootdir", str(EXAMPLES)]
    run = subprocess.run(
        [str(place / "bin/ascend-emulate"), "--", "python", "-m", *suite, str(EXAMPLES / "test_dense_llama.py")],
        env={**os.environ, "VLLM_PLUGINS": "ascend", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert run.returncode == 0, (run.stdout + run.stderr)[-4000:]
    assert "1 passed" in run.stdout
