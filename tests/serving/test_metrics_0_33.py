"""Our metrics on vLLM 0.33, from its own statistics of steps; see test_metrics.py for 0.11."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.parser.harmony", reason="needs vLLM 0.33")

from prometheus_client import REGISTRY
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.config import CUDAGraphMode
from vllm.v1.metrics.stats import SchedulerStats

from npu_gptoss.serving import metrics

pytestmark = pytest.mark.serving


def logger(name: str, counted: bool) -> metrics.StatLogger:
    model = SimpleNamespace(served_model_name=name, hf_config=SimpleNamespace(model_type="gpt_oss"))
    observed = SimpleNamespace(cudagraph_metrics=counted)
    return metrics.StatLogger(SimpleNamespace(model_config=model, observability_config=observed), 0)


def value(name: str, model: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"npu_gptoss_{name}_total", {"model_name": model, "engine": "0", **labels})


def stats(mode: Any, tokens: int, rows: int) -> SchedulerStats:
    return SchedulerStats(cudagraph_stats=CUDAGraphStat(tokens, rows, rows - tokens, str(mode)))


def test_no_series_stays_at_zero_without_a_counter() -> None:
    """Without --cudagraph-metrics a dashboard would show a server that never steps."""
    logger("silent", counted=False).record(SchedulerStats(), None)
    assert value("tokens", "silent", mode="eager") is None
    assert value("steps", "silent", mode="eager", bucket="none") is None


def test_steps_are_counted_from_vllms_own_statistics() -> None:
    ours = logger("counted", counted=True)
    assert value("tokens", "counted", mode="full") == 0, "before the first step, so that a rate sees it"
    for mode, tokens, rows in ((CUDAGraphMode.FULL, 5, 8), (CUDAGraphMode.FULL, 8, 8), (CUDAGraphMode.NONE, 70, 72)):
        ours.record(stats(mode, tokens, rows), None, mm_cache_stats=None, engine_idx=0)
    ours.record(SchedulerStats(), None)
    assert value("steps", "counted", mode="full", bucket="8") == 2
    assert (value("tokens", "counted", mode="full"), value("padding_tokens", "counted", mode="full")) == (13, 3)
    assert value("steps", "counted", mode="eager", bucket="none") == 1
    assert (value("tokens", "counted", mode="eager"), value("padding_tokens", "counted", mode="eager")) == (70, 2)
