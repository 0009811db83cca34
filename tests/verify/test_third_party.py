"""Kernels of another package, through a real entry point, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).with_name("third_party")
ON_CPU = (sys.executable, "-m", "npu_gptoss.cli", "verify", "--device", "cpu", "--cases", "1")


def test_a_third_party_kernel_with_a_mistake_is_caught_and_one_without_passes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = subprocess.run(
        [*ON_CPU, "their-kernels", "--json", str(file)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(PACKAGE)))},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert command.returncode == 1, command.stderr[-2000:]
    assert "ok   attention.paged.their_right [their-kernels:attention]" in command.stdout
    assert "FAIL attention.paged.their_wide_window [their-kernels:attention]" in command.stdout
    assert "times the tolerance" in command.stdout
    assert "again: npu-gptoss verify attention.paged.their_wide_window --seed 0 --cases 1" in command.stdout
    kernels = {entry["kernel"]: entry for entry in json.loads(file.read_text())["kernels"]}
    failed = [
        call["call"] for call in kernels["attention.paged.their_wide_window"]["calls"] if call["state"] == "failed"
    ]
    assert failed
    assert all("window" in name for name in failed), "a layer that sees all keys is right"
    assert kernels["attention.paged.their_right"]["ok"]
