"""Kernels of another package, through a real entry point, in a process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).with_name("third_party")


def verify(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(ROOT), str(PACKAGE)))
    return subprocess.run(
        [sys.executable, "-m", "npu_gptoss.cli", "verify", "--device", "cpu", "--cases", "1", *arguments],
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_a_third_party_kernel_with_a_mistake_is_caught_and_one_without_passes(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    command = verify("their-kernels", "--json", str(file))
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


def test_the_switch_leaves_third_party_kernels_out() -> None:
    command = verify("their-kernels", NPU_GPTOSS_DISABLE_PLUGINS="1")
    assert command.returncode == 2
    assert "'their-kernels' names no kernel" in command.stderr
