"""The set-up of `.venv-emulated` says early what is missing, and leaves other people's folders alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/setup/setup_emulated.py"


def run(venv: Path, *options: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--venv", str(venv), *options]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_a_missing_compiler_is_named_before_anything_is_made(tmp_path: Path) -> None:
    done = run(tmp_path / "venv", CXX="no-such-compiler")
    assert done.returncode == 1
    assert "the C++ compiler no-such-compiler is not there" in done.stderr
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_without_the_wheels_it_fails_with_the_reason(tmp_path: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    done = run(tmp_path / "venv", CXX=sys.executable, **variables)
    assert done.returncode == 1, done.stdout
    if "Python 3.11 is needed" in done.stderr:
        pytest.skip("there is no Python 3.11 here")
    assert "Could not find a version that satisfies the requirement torch==2.7.1" in done.stderr
