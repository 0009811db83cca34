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


@pytest.mark.parametrize(
    ("cann", "card", "ranks"),
    [
        pytest.param("8.3.rc1", "A3", 2, marks=pytest.mark.long),
        ("9.1", "A3", 4),
        pytest.param("9.1", "910B3", 2, marks=pytest.mark.long),  # 8.3 takes whole machines of eight on an A2
        pytest.param("8.3.rc1", "910B3", 8, marks=pytest.mark.long),
    ],
)
def test_rows_travel_to_experts_and_back(cann: str, card: str, ranks: int) -> None:
    """MC2 by the real torch_npu: unequal ranks, padding, counts, a graph; ranks that differ unsaid are refused."""
    run = machine.emulate(
        str(machine.FOLDER / "collectives.py"), str(ranks), "experts", machine=Machine(cann, ranks, card=card)
    )
    assert run.stdout == f"OK {6 * ranks}\n", run.stdout + run.stderr[-3000:]


def test_mismatched_collectives_are_refused() -> None:
    """The real device hangs; without a check a rank would take another collective's data."""
    script = machine.FOLDER / "collectives.py"
    run = machine.emulate(str(script), "2", "apart", machine=Machine(devices=2))
    assert run.stdout == "OK 6\n", run.stdout + run.stderr[-3000:]
