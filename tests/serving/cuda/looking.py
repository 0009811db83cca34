"""One engine on a GPU, whose canary looks at right graphs, and at graphs that a fault makes wrong; prints JSON.

    python -m tests.serving.cuda.looking CHECKPOINT [SIZES]

For each fault: what the canary finds wrong, by mode. Then full graphs are left under a fault: which ones remain.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

Replay = Callable[..., Any]


def stale_tokens(right: Replay, runner: Any) -> Replay:
    """Graphs read the tokens of another step."""

    def run(self: Any, desc: Any) -> Any:
        runner.input_buffers.input_ids.zero_()
        return right(self, desc)

    return run


def lost_first(right: Replay, runner: Any) -> Replay:
    """The first replay of each graph ends in NaN."""
    seen = set()

    def run(self: Any, desc: Any) -> Any:
        hidden = right(self, desc)
        if desc not in seen:
            seen.add(desc)
            hidden.fill_(float("nan"))
        return hidden

    return run


def one_behind(right: Replay, runner: Any) -> Replay:
    """Each replay gives the rows of the replay before."""
    kept: dict[Any, Any] = {}

    def run(self: Any, desc: Any) -> Any:
        hidden = right(self, desc)
        now = hidden.clone()
        hidden.copy_(kept.get(desc, now))
        kept[desc] = now
        return hidden

    return run


FAULTS = (stale_tokens, lost_first, one_behind)


def main() -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM
    from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

    from npu_gptoss.serving import canary

    model, sizes = sys.argv[1], [int(size) for size in sys.argv[2:]] or [1, 2, 4, 8]
    options = {"max_model_len": 1024, "max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 30, "skip_tokenizer_init": True}
    llm = LLM(model, gpu_memory_utilization=0.3, compilation_config={"cudagraph_capture_sizes": sizes}, **options)
    worker = llm.llm_engine.model_executor.driver_worker.worker
    runner = worker.model_runner
    began = time.monotonic()
    found = canary.look(worker)
    said: dict[str, Any] = {"right": found.wrong, "seconds": time.monotonic() - began}
    said |= {
        "replayed": found.replayed,
        "captured": found.captured,
        "largest": found.largest,
        "unjudged": found.unjudged,
    }
    for fault in FAULTS:
        with mock.patch.object(
            ModelCudaGraphManager, "run_fullgraph", fault(ModelCudaGraphManager.run_fullgraph, runner)
        ):
            said[fault.__name__] = canary.look(worker).wrong
    said["afterwards"] = canary.look(worker).wrong
    with mock.patch.object(
        ModelCudaGraphManager, "run_fullgraph", lost_first(ModelCudaGraphManager.run_fullgraph, runner)
    ):
        canary.run(worker)
    said["left"] = canary.release().captured(runner)
    print(json.dumps(said))


if __name__ == "__main__":
    main()
