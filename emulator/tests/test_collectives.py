"""torch_npu's own ProcessGroupHCCL on the emulated HCCL: every collective, five types, also in a graph."""

from __future__ import annotations

import pytest
from ascend_emulator.launch import Machine

from emulator.tests import machine

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_collectives(ranks: int) -> None:
    script = machine.FOLDER / "collectives.py"
    run = machine.emulate(str(script), str(ranks), machine=Machine(devices=ranks))
    assert run.stdout.startswith("OK "), run.stdout + run.stderr[-3000:]


def test_mismatched_collectives_are_refused() -> None:
    """The real device hangs; without a check a rank would take another collective's data."""
    script = machine.FOLDER / "collectives.py"
    run = machine.emulate(str(script), "2", "apart", machine=Machine(devices=2))
    assert run.stdout == "OK 6\n", run.stdout + run.stderr[-3000:]
