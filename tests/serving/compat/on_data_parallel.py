"""One of two data parallel ranks on a CPU, started by test_experts_exchange.py with RANK PORT.

Prints the rows that this rank's experts' layer receives, and its part of the sum of all ranks' results.
"""

from __future__ import annotations

import json
import sys

import torch
from vllm.config import ParallelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import ensure_model_parallel_initialized, get_ep_group, init_distributed_environment
from vllm.forward_context import get_forward_context, set_forward_context

from npu_gptoss.serving import compat

ROWS = (1, 3)  # per rank: one engine decodes, the other reads a prompt


def main(rank: int, port: int) -> None:
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
    with (
        set_forward_context(None, config, num_tokens=ROWS[rank]),
        get_forward_context().dp_metadata.sp_local_sizes(1),
    ):
        rows, routed = get_ep_group().dispatch(hidden, logits)
        kept = get_ep_group().combine(rows * (rank + 1))  # each rank's part of a layer that all share
    print(json.dumps([rows[:, 0].tolist(), routed[:, 0].tolist(), kept[:, 0].tolist()]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
