"""The record of each step of the model, and its way from the worker to the server's /metrics.

A worker knows the replayed graph and the padding rows; another process answers /metrics. The record travels in vLLM's
own messages, so it works with any number of engines, hosts and API servers:

    worker: ModelRunnerOutput → scheduler: SchedulerStats → API server: the stat logger (`metrics.py`)

vLLM 0.11.0 has no field for it (`releases/steps_0_11.py`). Later releases have one (`cudagraph_stats`, vllm PR 29825);
the kernels follow the mode's name there (`kernel_report`). The hooks are in `compat/server/metrics.py`. Imports neither
vLLM nor torch.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import dataclass

EAGER = "eager"
MODES = (EAGER, "piecewise", "full")  # vLLM's CUDAGraphMode of a step: NONE, PIECEWISE, FULL

Kernels = tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Step:
    """An execution of the model for requests; warm-up, captures and idle steps of data parallelism do not count.

    mode: one of MODES. bucket: the number of tokens that the replayed graph was captured with, 0 without a graph.
    tokens: rows that requests need. padding: rows computed in addition. kernels: (operation, kernel, solution) of every
    kernel selected so far, or empty if unchanged since the last step.
    """

    mode: str
    bucket: int
    tokens: int
    padding: int
    kernels: Kernels = ()


SECONDS_BETWEEN_LOOKS = 1.0  # kernels do not change once all sizes have been computed


def kernel_report(selected_kernels: Callable[[], Kernels]) -> Callable[[str], str]:
    """Returns a function that appends this process's kernels to the name of a step's mode, at most once a second."""
    looked, suffix = float("-inf"), ""

    def with_kernels(mode: str) -> str:
        nonlocal looked, suffix
        if (now := time.monotonic()) - looked >= SECONDS_BETWEEN_LOOKS:
            found = selected_kernels()  # none for another model
            looked, suffix = now, f" {json.dumps(found)}" if found else ""
        return mode + suffix

    return with_kernels


@functools.lru_cache(maxsize=16)
def without_kernels(mode: str) -> tuple[str, Kernels]:
    """Splits a mode's name from the kernels that follow it."""
    name, _, kernels = mode.partition(" ")
    return name, tuple(tuple(names) for names in json.loads(kernels or "[]"))
