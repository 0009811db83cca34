"""Corrupt checkpoints of a fixed seed through `npu-gptoss generate`: a sentence, or the right tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.model import fuzz
from tests.model.corrupt import PRISTINE, Case, write_pristine


@pytest.mark.slow
def test_no_corrupt_checkpoint_hangs_or_ends_in_a_traceback() -> None:
    command = [sys.executable, "-m", "tests.model.fuzz", "--count", "80", "--seed", "20261122"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "80 checkpoints" in done.stdout


def _hangs(_: Path) -> int:
    import time

    time.sleep(60)
    return 0


def _eats(_: Path) -> int:
    return len(bytearray(fuzz.MEMORY * 2))


def _raises(_: Path) -> int:
    raise RuntimeError("a defect")


def _clears_the_screen(_: Path) -> int:
    print("npu-gptoss generate: \x1b[2J", file=sys.stderr)
    return 2


def _answers_wrongly(_: Path) -> int:
    print('[{"token_ids": [1]}]')
    return 0


@pytest.mark.parametrize(
    ("action", "kind"),
    [
        (_hangs, "hang"),
        (_eats, "memory"),
        (_raises, "traceback"),
        (_clears_the_screen, "unreadable"),
        (_answers_wrongly, "wrong"),
    ],
)
def test_fuzz_reports_hangs_memory_tracebacks_and_wrong_tokens(tmp_path, monkeypatch, action, kind) -> None:
    monkeypatch.setattr(fuzz, "PATIENCE", 2)
    write_pristine(tmp_path / "pristine" / PRISTINE[0], PRISTINE[0])
    (tmp_path / "pristine" / f"{PRISTINE[0]}.json").write_text("[1, 2]")
    (tmp_path / "scratch").mkdir()
    one = Case(0, "none", PRISTINE[0], lambda _: "nothing")
    assert fuzz.run(one, action, tmp_path / "pristine", tmp_path / "scratch").kind == kind
