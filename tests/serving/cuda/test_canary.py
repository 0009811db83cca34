"""The canary of whole steps on a GPU: silent on right graphs, and it sees graphs that are made wrong."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.checkpoints import write_random_checkpoint
from tests.markdown import ROOT
from tests.serving.cuda.looking import FAULTS

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")
pytestmark = [pytest.mark.cuda, pytest.mark.slow]


@pytest.mark.parametrize("mxfp4", [False, True])
def test_the_canary_sees_wrong_graphs_and_no_others(tmp_path, mxfp4):
    write_random_checkpoint(tmp_path, hidden=256, intermediate=256, mxfp4=mxfp4)
    command = [sys.executable, "-m", "tests.serving.cuda.looking", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]
    said = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))  # vLLM logs there too
    assert (said["right"], said["afterwards"]) == ({}, {})
    assert said["replayed"] >= said["captured"] - 1, "one row is never a mixed step"
    assert said["largest"] < 0.06
    assert said["unjudged"] == 0
    assert [sorted(said[fault.__name__]) for fault in FAULTS] == [["FULL"]] * len(FAULTS)
    assert sorted(said["left"]) == ["PIECEWISE"]
