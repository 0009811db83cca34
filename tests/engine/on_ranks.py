"""One rank of engines, as test_parallel.py starts it: DEVICE DIRECTORY RANK SIZE PORT, and EXPERTS GRAPHS of each.

On a CPU in fp32 over gloo, graphs by running again; on GPUs in bf16 over NCCL, with real graphs.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys

import torch
import torch.distributed as dist

from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine import engine as engine_module
from npu_gptoss.model.ranks import Ranks
from tests.engine.recording import RerunRecorder
from tests.oracle import random_prompts

LENGTHS = (1, 5, 17, 40)
PARAMS = (
    SamplingParams(max_tokens=12),
    SamplingParams(max_tokens=12, temperature=1.0),  # a seed of its own: the ranks must agree on one
    SamplingParams(max_tokens=12, temperature=1.0, seed=5),
    SamplingParams(max_tokens=9),
)


def answers(engine: Engine) -> dict[str, list]:
    prompts = random_prompts(LENGTHS, 512)
    logits = engine.batch_logits(prompts)
    return {
        "tokens": [result.token_ids for result in engine.generate(prompts, PARAMS)],
        "logits": torch.cat(logits).tolist(),
    }


def main(device: str, directory: str, rank: str, size: str, port: str, *layouts: str) -> None:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(80, exit=True)  # a rank that hangs says where
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, WORLD_SIZE=size)
    dtype = "bfloat16"
    if device == "cpu":
        dist.init_process_group("gloo")
        engine_module.Recorder = RerunRecorder
        dtype = "float32"
    else:
        device = f"cuda:{rank}"
        torch.cuda.set_device(int(rank))
        dist.init_process_group("nccl")
    # each rank believes in another number of free blocks; they must agree
    engine_module.default_num_blocks = lambda *_: 100 + int(rank)
    given = []
    for experts, graphs in zip(layouts[::2], layouts[1::2], strict=True):
        ranks = Ranks.of_this_process(experts)
        engine = Engine(directory, device=device, dtype=dtype, graphs=graphs, graph_sizes=(1, 2, 4), ranks=ranks)
        assert engine.scheduler.allocator.num_blocks == 100
        given.append(answers(engine))
        engine.close()
    print(json.dumps(given))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
