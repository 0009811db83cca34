"""The environment of evalscope: an exact lock that lacks only what it names, and a set-up that says what is wrong."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.setup_venv import read_pins
from tests.scripts.shell import ROOT

SCRIPT = ROOT / "scripts/setup_evalscope.py"
LOCK = ROOT / "requirements/evalscope.txt"
PYTHON = ROOT / ".venv-evalscope/bin/python"
# what evalscope asks for and only other benchmarks import, and two programs of the command line
LEFT_OUT = {
    *("jieba", "math-verify", "nltk", "rouge-chinese", "rouge-score", "sacrebleu", "zhconv"),
    *("typer", "hf-xet"),
}


def test_every_version_is_exact_and_listed_once() -> None:
    lines = [line for line in LOCK.read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert len(read_pins(LOCK)) == len(lines)


def test_no_giant_came_back() -> None:
    pins = read_pins(LOCK)
    assert {"torch", "triton", "vllm", "scipy", "tensorflow"}.isdisjoint(pins)
    assert not [name for name in pins if name.startswith("nvidia")]
    assert LEFT_OUT.isdisjoint(pins)


def test_the_lock_says_what_it_leaves_out() -> None:
    comment = " ".join(line for line in LOCK.read_text().splitlines() if line.startswith("#"))
    assert [name for name in LEFT_OUT if name not in comment] == []


@pytest.mark.evalscope
@pytest.mark.skipif(not PYTHON.exists(), reason="evalscope is not set up; make setup-evalscope")
def test_nothing_else_is_missing_and_versions_fit() -> None:
    """The lock is installed without a resolver, so pip has to be asked whether it is complete."""
    done = subprocess.run([str(PYTHON), "-m", "pip", "check"], capture_output=True, text=True, check=False)
    unknown = [
        line
        for line in done.stdout.splitlines()
        if not (found := re.search(r"requires ([\w-]+), which is not installed", line)) or found[1] not in LEFT_OUT
    ]
    assert unknown == [] or done.returncode == 0


def run(venv: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--venv", str(venv)]
    return subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120)


def test_a_folder_that_it_did_not_make_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    done = run(tmp_path)
    assert done.returncode == 1
    assert "was not made by this set-up" in done.stderr
    assert (tmp_path / "mine").exists()


@pytest.mark.slow
def test_without_the_wheels_it_fails_with_the_reason(tmp_path: Path) -> None:
    variables = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}
    done = run(tmp_path / "venv", **variables)
    assert done.returncode == 1, done.stdout
    assert "No matching distribution found for evalscope" in done.stderr
    assert "what is finished is not done twice" in done.stderr
