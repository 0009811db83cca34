"""The engine with ACL graphs on the emulated 910B, as test_npu.py starts it: on_npu.py DIRECTORY."""

from __future__ import annotations

import json
import sys

import torch_npu  # noqa: F401  (makes the device)

from npu_gptoss.engine import Engine, SamplingParams
from tests.oracle import random_prompts

LENGTHS = (1, 15, 40)


def main(directory: str) -> None:
    prompts = random_prompts(LENGTHS, 512)
    answers = {}
    for mode in ("none", "piecewise"):
        engine = Engine(directory, device="npu", num_blocks=30, block_size=128, graphs=mode, graph_sizes=(1, 2, 4))
        results = engine.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True))
        answers[mode] = [result.token_ids for result in results]
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
