"""Data parallel engines on CPUs compute each layer's experts together: without the exchange every answer is garbage."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving.compat import on_data_parallel
from tests.serving.server import free_port

pytestmark = [pytest.mark.serving, pytest.mark.slow]

ROOT = Path(__file__).parents[3]


def on_two_ranks() -> list[list[list[float]]]:
    """Returns the output of each rank."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "OMP_NUM_THREADS": "1",
    }
    port = str(free_port())
    ranks = [
        subprocess.Popen(
            [sys.executable, on_data_parallel.__file__, str(rank), port],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0]
    return [json.loads(text.splitlines()[-1]) for text in printed]


def test_data_parallel_engines_on_cpus_exchange_experts_rows():
    rows, logits = [1.0, 2.0, 2.0, 2.0], [10.0, 11.0, 11.0, 11.0]
    # the sum of both ranks' parts: once and twice the rows
    assert on_two_ranks() == [[rows, logits, [3.0]], [rows, logits, [6.0, 6.0, 6.0]]]
