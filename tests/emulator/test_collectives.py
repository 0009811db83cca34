"""torch_npu's own ProcessGroupHCCL on the emulated HCCL: every collective, five types, also in a graph."""

from __future__ import annotations

import pytest

from npu_gptoss.emulator.launch import Machine
from tests.emulator import machine

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [2, 4])
def test_collectives(ranks: int) -> None:
    script = machine.FOLDER / "collectives.py"
    run = machine.emulate(str(script), str(ranks), machine=Machine(devices=ranks))
    assert run.stdout.startswith("OK "), run.stdout + run.stderr[-3000:]
