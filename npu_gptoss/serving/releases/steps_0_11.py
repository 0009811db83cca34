"""A step's record on vLLM 0.11.0: made in the worker, and carried in `kv_connector_stats` to the stat logger.

That is the free-form part of the scheduler's statistics. The stat logger removes the record before vLLM's own loggers
run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from npu_gptoss.serving.steps import EAGER, Kernels, Step

KEY = "npu_gptoss_step"  # in SchedulerStats.kv_connector_stats


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
            _put(step, carrier)
        return output


@dataclass
class StepStats:
    """Stands in for a connector's KVConnectorStats, of which vLLM's scheduler passes on `data`."""

    data: dict[str, Any]

    def aggregate(self, other: Any) -> StepStats:
        """Keeps one of all workers' records, which are equal."""
        return self


def _put(step: Step, carrier: Any) -> None:
    """Adds a step to a ModelRunnerOutput."""
    from vllm.v1.outputs import KVConnectorOutput

    if carrier.kv_connector_output is None:
        carrier.kv_connector_output = KVConnectorOutput()
    told = carrier.kv_connector_output
    if told.kv_connector_stats is None:
        told.kv_connector_stats = StepStats({})
    told.kv_connector_stats.data[KEY] = asdict(step)


def take(stats: Any) -> Step | None:
    """Removes a step from a SchedulerStats, so that vLLM's own remain."""
    if stats is None or not stats.kv_connector_stats or KEY not in stats.kv_connector_stats:
        return None
    rest = dict(stats.kv_connector_stats)
    found = rest.pop(KEY)
    stats.kv_connector_stats = rest or None
    return Step(**{**found, "kernels": tuple(tuple(names) for names in found["kernels"])})
