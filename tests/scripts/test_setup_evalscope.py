"""The environment of evalscope: an exact lock that lacks only what it names, and a set-up that says what is wrong."""

from __future__ import annotations

import re
import subprocess

import pytest

from scripts.setup.setup_venv import read_pins
from tests.scripts.shell import ROOT

LOCK = ROOT / "requirements/evalscope.txt"
PYTHON = ROOT / ".venv-evalscope/bin/python"
# what evalscope asks for and only other benchmarks import, and two programs of the command line
LEFT_OUT = {
    *("jieba", "nltk", "rouge-chinese", "rouge-score", "sacrebleu", "zhconv"),
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
    missing = [re.search(r"requires ([\w-]+), which is not installed", line) for line in done.stdout.splitlines()]
    assert all(missing), done.stdout
    unlocked = (ROOT / ".venv-evalscope/.npu-gptoss/unlocked").exists()  # by the resolver, which left nothing out
    assert {found[1] for found in missing} == (set() if unlocked else LEFT_OUT), done.stderr
