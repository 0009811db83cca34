"""Greedy tokens of a checkpoint through vLLM's engine on a GPU, in a process of its own, with what its graphs did.

`python -m tests.serving.cuda.answers` reads a `Question` as JSON and prints an `Answer` as the last line.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any

NEVER_REFRESHED = ("lengths", "block_table")  # of a decode step


@dataclass(frozen=True)
class Question:
    """options: of vLLM's LLM. spoil: what of a step each graph is to read from where it was at its capture."""

    model: str
    prompts: list[list[int]]
    max_tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    times: int = 1  # that all prompts are asked; the last answers count
    spoil: str | None = None


@dataclass(frozen=True)
class Answer:
    """full: replays of whole steps, by rows. piecewise: replays of steps in pieces. captured: rows of each graph
    of a whole step. late: captures once the server was ready. preemptions: of requests, by vLLM's count."""

    tokens: list[list[int]]
    full: dict[int, int]
    piecewise: int
    captured: list[int]
    late: int
    preemptions: int


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that what is counted is in this process
    import torch
    from vllm import LLM, SamplingParams
    from vllm.compilation.breakable_cudagraph import BreakableCUDAGraphWrapper
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    question = Question(**json.load(sys.stdin))
    seen: Counter[Any] = Counter()

    def counted(owner: type, name: str, key: Any) -> None:
        original = getattr(owner, name)

        def count(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[key(self, *args)] += 1
            return original(self, *args, **kwargs)

        setattr(owner, name, count)

    counted(torch.cuda.CUDAGraph, "capture_begin", lambda *_: "captures")
    counted(CudaGraphManager, "run_fullgraph", lambda _, what: what.num_tokens)
    counted(BreakableCUDAGraphWrapper, "_replay", lambda *_: "piecewise")
    managers = []
    counted(CudaGraphManager, "capture", lambda self, *_: managers.append(self) or "managers")
    if question.spoil:
        spoil(question.spoil)

    options = {"skip_tokenizer_init": True, "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
    llm = LLM(question.model, **options | {"disable_log_stats": False} | question.options)
    seen.clear()
    sampling = SamplingParams(temperature=0, max_tokens=question.max_tokens, ignore_eos=True, detokenize=False)
    for _ in range(question.times):
        found = llm.generate([{"prompt_token_ids": ids} for ids in question.prompts], sampling, use_tqdm=False)
    answer = Answer(
        tokens=[list(output.outputs[0].token_ids) for output in found],
        full={rows: count for rows, count in seen.items() if isinstance(rows, int)},
        piecewise=seen["piecewise"],
        captured=sorted(what.num_tokens for what in managers[-1].graphs) if managers else [],
        late=seen["captures"],
        preemptions=int(sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")),
    )
    print(json.dumps(asdict(answer)), flush=True)
    os._exit(0)  # without a tokenizer vLLM does not end by itself


def spoil(name: str) -> None:
    """Hands each decode step a copy, as a builder with tensors of its own would: a graph keeps the first."""
    from npu_gptoss.attention import DecodeMetadata
    from npu_gptoss.serving.cuda.cache import StepBuilder

    build = StepBuilder.build

    def stale(self: StepBuilder, *args: Any, **kwargs: Any) -> Any:
        step = build(self, *args, **kwargs)
        return replace(step, **{name: getattr(step, name).clone()}) if isinstance(step, DecodeMetadata) else step

    StepBuilder.build = stale


if __name__ == "__main__":
    main()
