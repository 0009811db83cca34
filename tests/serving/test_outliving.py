"""SIGKILL of real engines under streams, whose tokens are compared with an undisturbed run's."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from scripts import serve_here
from tests.serving.in_flight import descendants, engines_of, is_running
from tests.serving.outliving import Run, served
from tests.serving.server import wait_for

pytestmark = [pytest.mark.serving, pytest.mark.slow]
SHORT = Run(streams=8, kills=2, kinds=("greedy", "seeded", "structured", "chat"))
EMULATED = [pytest.mark.emulated, pytest.mark.long]
RUNS = {
    "short": (SHORT, ()),
    "short, vLLM 0.33": (replace(SHORT, stack="cpu-0.33"), [pytest.mark.vllm033, pytest.mark.long]),
    "short, two engines": (replace(SHORT, engines=2), pytest.mark.long),
    "short, CANN 8.3": (replace(SHORT, stack="emulated"), EMULATED),
    "short, CANN 9.1": (replace(SHORT, stack="emulated-9.1"), EMULATED),
    "short, CUDA": (Run("cuda", streams=44, kills=4), [pytest.mark.cuda, pytest.mark.long]),
    "all": (Run(), pytest.mark.long),
    "all, two engines": (Run(engines=2), pytest.mark.long),
}


@pytest.mark.parametrize("asked", [pytest.param(asked, marks=marks, id=name) for name, (asked, marks) in RUNS.items()])
def test_streams_end_with_their_engine_or_a_crash_loop_goes_on(tmp_path: Path, asked: Run) -> None:
    from npu_gptoss.tiny.checkpoint import write_tiny

    log = tmp_path / "log"
    write_tiny(tmp_path / "model", trained=True)
    below: list[int] = []

    def once_more(process: Any) -> None:
        below.extend(descendants(process.pid))
        os.kill(engines_of(process.pid)[0], signal.SIGKILL)
        assert process.wait(60) == 1

    loops = asked.kills == 2  # more take longer than the minutes in which restarts count
    record = served(asked, tmp_path / "model", log, *([once_more] if loops else []))
    assert record["kills"] == asked.kills, record
    assert record["equal"] == asked.streams, record
    assert record["seen by /health"], record
    assert record["at rest"]
    if loops:
        assert "2 restarts within 600 s did not help" in serve_here.likely_reason(log)
    assert wait_for(lambda: not any(map(is_running, below)), 15)
