"""The record of each step of the model, and its way from the worker to the server's /metrics.

A worker knows the replayed graph and the padding rows; another process answers /metrics. The record travels in vLLM's
own messages, so it works with any number of engines, hosts and API servers:

    worker: ModelRunnerOutput → scheduler: SchedulerStats → API server: the stat logger (`metrics.py`)

vLLM 0.11.0 has no field for it. Up to the scheduler it is an attribute of the output; from there it is in
`kv_connector_stats`, the free-form part of the statistics, and the stat logger removes it before vLLM's own loggers
run. Later releases have a field (`cudagraph_stats`, vllm PR 29825); the kernels follow the mode's name there
(`kernel_report`). The hooks are in `compat/server/metrics.py`. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

ATTRIBUTE = "npu_gptoss_step"  # of a ModelRunnerOutput
KEY = "npu_gptoss_step"  # in SchedulerStats.kv_connector_stats

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


class StepObserver:
    """Observes a model runner: vLLM's graph wrappers replay the graph that its dispatcher chooses."""

    def __init__(self, dispatcher: Any, selected_kernels: Callable[[], Kernels]) -> None:
        self._selected_kernels = selected_kernels
        self._told: Kernels = ()
        self._dispatched: tuple[str, int] | None = None
        chosen = dispatcher.dispatch

        def dispatch(descriptor: Any, *arguments: Any, **keywords: Any) -> Any:
            found = chosen(descriptor, *arguments, **keywords)
            self._dispatched = (found[0].name, descriptor.num_tokens)
            return found

        dispatcher.dispatch = dispatch

    def observe(self, execute: Callable[[], Any], tokens: int) -> Any:
        """Returns the output of `execute` with the step's record. An output without tokens gets none."""
        self._dispatched = None
        output = execute()
        # with asynchronous scheduling vLLM wraps the output until its tokens are on the host
        carrier = getattr(output, "_model_runner_output", output)
        if self._dispatched is not None and getattr(carrier, "req_ids", None):
            mode, rows = self._dispatched
            graph = mode != "NONE"
            kernels = self._selected_kernels()
            news = kernels if kernels != self._told else ()
            self._told = kernels
            step = Step(mode.lower() if graph else EAGER, rows if graph else 0, tokens, max(rows - tokens, 0), news)
            setattr(carrier, ATTRIBUTE, step)
        return output


def put(step: Step, outputs: dict[int, Any]) -> None:
    """Adds a step to the statistics of a scheduler step's outputs (client -> EngineCoreOutputs)."""
    for output in outputs.values():
        stats = output.scheduler_stats
        if stats is not None:  # one front end gets them; none does when statistics are off
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: asdict(step)}
            return


def take(stats: Any) -> Step | None:
    """Removes a step from a SchedulerStats, so that vLLM's own remain."""
    if stats is None or not stats.kv_connector_stats or KEY not in stats.kv_connector_stats:
        return None
    rest = dict(stats.kv_connector_stats)
    found = rest.pop(KEY)
    stats.kv_connector_stats = rest or None
    return Step(**{**found, "kernels": tuple(tuple(names) for names in found["kernels"])})


SECONDS_BETWEEN_LOOKS = 1.0  # kernels do not change once all sizes have been computed


def kernel_report(
    selected_kernels: Callable[[], Kernels], clock: Callable[[], float] = time.monotonic
) -> Callable[[str], str]:
    """Returns a function that appends this process's kernels to the name of a step's mode, at most once a second."""
    looked, suffix = float("-inf"), ""

    def with_kernels(mode: str) -> str:
        nonlocal looked, suffix
        if (now := clock()) - looked >= SECONDS_BETWEEN_LOOKS:
            found = selected_kernels()  # none for another model
            looked, suffix = now, f" {json.dumps(found)}" if found else ""
        return mode + suffix

    return with_kernels


@functools.lru_cache(maxsize=16)
def without_kernels(mode: str) -> tuple[str, Kernels]:
    """Splits a mode's name from the kernels that follow it."""
    name, _, kernels = mode.partition(" ")
    return name, tuple(tuple(names) for names in json.loads(kernels or "[]"))
