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
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from npu_gptoss.serving import metrics
from npu_gptoss.serving.releases.vllm_0_33 import count_steps
from npu_gptoss.serving.steps import kernel_report

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
    """A dashboard would show a server that never steps."""
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


def test_steps_are_counted_without_an_option_and_vllm_prints_no_table() -> None:
    """vLLM's own logger, which is made after ours, looks at the same option."""
    observed = SimpleNamespace(cudagraph_metrics=False)
    count_steps(SimpleNamespace(observability_config=observed))
    assert observed.cudagraph_metrics, "the engines get the configuration now"
    model = SimpleNamespace(served_model_name="unasked", hf_config=SimpleNamespace(model_type="gpt_oss"))
    for number in range(2):  # as many as there are engines
        metrics.StatLogger(SimpleNamespace(model_config=model, observability_config=observed), number)
    assert not observed.cudagraph_metrics
    assert [value("tokens", "unasked", mode="full", engine=number) for number in "01"] == [0, 0]


def test_kernels_travel_behind_the_mode_of_a_step_unseen_by_vllm() -> None:
    kernels = (("attention.paged", "attention.paged.gluon", "gluon"),)
    told = stats(kernel_report(lambda: kernels)(str(CUDAGraphMode.FULL)), 5, 8)
    told = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(told)[0])
    logger("kernels", counted=True).record(told, None)
    labels = {"operation": "attention.paged", "kernel": "attention.paged.gluon", "solution": "gluon"}
    info = {"model_name": "kernels", "engine": "0", **labels}
    assert REGISTRY.get_sample_value("npu_gptoss_kernel_info", info) == 1
    assert value("steps", "kernels", mode="full", bucket="8") == 1
    assert told.cudagraph_stats.runtime_mode == str(CUDAGraphMode.FULL)
