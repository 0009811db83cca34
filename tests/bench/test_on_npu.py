"""Kernels timed on the emulated 910B, as docs/performance.md asks of a card; the times themselves say nothing here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ascend_emulator.launch import Machine

from emulator.tests import machine
from emulator.tests.test_triton import PACKAGES, needs_compiler
from tests.checkpoints import write_random_checkpoint

ROOT = Path(__file__).parents[2]


@pytest.mark.emulated
@pytest.mark.ascend_compiler
@pytest.mark.slow
@needs_compiler
def test_packed_experts_can_be_timed_beside_bf16(tmp_path: Path) -> None:
    """An operator that an NPU lacks for bytes ended the command before its first number."""
    write_random_checkpoint(tmp_path / "model", layers=1)
    file, kernels = tmp_path / "found.json", ("ascend", "triton_ascend")
    run = machine.emulate(
        *("-m", "npu_gptoss.cli", "bench", "kernel", "moe.expand", "moe.experts", "--kernel", *kernels),
        *("--weights", "mxfp4", "bf16", "--batch", "1", "--tokens", "16", "--samples", "2", "--device", "npu"),
        *("--model", str(tmp_path / "model"), "--json", str(file)),
        machine=Machine(triton=PACKAGES),
        PYTHONPATH=str(ROOT),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    timed = {record["kernel"] for record in json.loads(file.read_text())["records"]}
    assert timed == {"moe.expand.triton_ascend", "moe.experts.ascend_packed", "moe.experts.ascend"}
