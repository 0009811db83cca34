"""Corrupt checkpoints of a fixed seed through `npu-gptoss generate`: a sentence, or the right tokens."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_no_corrupt_checkpoint_hangs_or_ends_in_a_traceback() -> None:
    command = [sys.executable, "-m", "tests.model.fuzz", "--count", "80", "--seed", "20261122"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "80 checkpoints" in done.stdout
