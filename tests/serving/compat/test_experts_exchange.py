"""Data parallel engines on CPUs compute each layer's experts together: without the exchange every answer is garbage.

As a program, with RANK PORT, this file is one of two ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import (
    destroy_distributed_environment,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_ep_group,
    init_distributed_environment,
)
from vllm.forward_context import get_forward_context, set_forward_context

from npu_gptoss.serving import compat
from tests.serving.server import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
ROWS = (1, 3)  # per rank: one engine decodes, the other reads a prompt


def one_of_two(rank: int, port: int) -> None:
    """Prints the rows that this rank's experts' layer receives, and its part of the sum of all ranks' results."""
    compat.apply()
    parallel = ParallelConfig(
        data_parallel_size=2,
        data_parallel_rank=rank,
        data_parallel_master_ip="127.0.0.1",
        data_parallel_master_port=port,
        _data_parallel_master_port_list=[port],
    )
    config = VllmConfig(parallel_config=parallel)
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    hidden, logits = torch.full((ROWS[rank], 2), rank + 1.0), torch.full((ROWS[rank], 4), rank + 10.0)
    with set_forward_context(None, config, num_tokens=ROWS[rank]), get_forward_context().dp_metadata.sp_local_sizes(1):
        rows, routed = get_ep_group().dispatch(hidden, logits)
        kept = get_ep_group().combine(rows * (rank + 1))  # each rank's part of a layer that all share
    print(json.dumps([rows[:, 0].tolist(), routed[:, 0].tolist(), kept[:, 0].tolist()]), flush=True)
    destroy_model_parallel()  # at the interpreter's end gloo's threads abort the process now and then
    destroy_distributed_environment()


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
            [sys.executable, __file__, str(rank), port], env=environment, stdout=subprocess.PIPE, text=True
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


if __name__ == "__main__":
    one_of_two(*map(int, sys.argv[1:]))
