"""ACL graphs behind the same interface: the engine on the emulated 910B, replayed against launched one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emulator.tests import machine
from tests.checkpoints import write_random_checkpoint

pytestmark = pytest.mark.emulated
ROOT = Path(__file__).parents[2]


def test_piecewise_acl_graphs_choose_the_tokens_of_steps_without_graphs(tmp_path: Path) -> None:
    """Three requests in the bucket of four; attention between the pieces, with lengths from the host."""
    write_random_checkpoint(tmp_path, layers=2)
    run = machine.emulate(str(ROOT / "tests/engine/on_npu.py"), str(tmp_path), PYTHONPATH=str(ROOT))
    assert run.returncode == 0, run.stderr[-4000:]
    answers = json.loads(run.stdout.splitlines()[-1])
    assert answers["piecewise"] == answers["none"]
