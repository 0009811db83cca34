"""ACL graphs on the emulated device: capture records, replay runs, and R81 to R91 refuse (on_device/graph_cases.py)."""

from __future__ import annotations

import pytest
from ascend_emulator.launch import Machine
from ascend_emulator.stacks import STACKS, Stack

from emulator.tests import machine

FILE = "graph_cases.py"
LATE = "late_replay_cases.py"
pytestmark = pytest.mark.emulated


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@pytest.mark.parametrize("case", machine.cases_of(FILE))
def test_graph(case: str, stack: Stack) -> None:
    machine.check(FILE, case, Machine(stack.cann[0]))


@pytest.mark.parametrize("stack", STACKS, ids=lambda stack: stack.name)
@pytest.mark.parametrize("case", machine.cases_of(LATE))
def test_late_replays(case: str, stack: Stack) -> None:
    machine.check(LATE, case, Machine(stack.cann[0], defects=("late-replays",)))


def test_task_queue_2_cannot_capture_R81() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from tools import captured; captured(lambda: 0)"
    run = machine.emulate("-c", code, str(machine.FOLDER), TASK_QUEUE_ENABLE="0", ASCEND_EMULATOR_TASK_QUEUE="2")
    assert run.returncode
    assert "[R81]" in run.stderr
