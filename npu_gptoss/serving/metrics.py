"""This plugin's Prometheus metrics on vLLM's /metrics: kernels, graph replays and eager steps, padding, refusals.

`StatLogger` is a stat logger plugin of vLLM (entry point group `vllm.stat_logger_plugins`). vLLM 0.11.0 does not load
that group yet, so `compat/server/metrics.py` hands it over there. vLLM 0.23 and 0.33 count steps with
--cudagraph-metrics, which `limits.py` sets for gpt-oss. One instance per engine, one set of metrics per process.
docs/monitoring.md lists them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge

from npu_gptoss import envs
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.releases import installed_vllm, release_of
from npu_gptoss.serving.releases.vllm import StatLoggerBase, counts_steps, step_of
from npu_gptoss.serving.steps import EAGER, MODES, Kernels, Step

if TYPE_CHECKING:
    from npu_gptoss.serving.releases.vllm import VllmConfig

NO_BUCKET = "none"
LABELS = ("model_name", "engine")  # as on vLLM's own metrics


@dataclass(frozen=True)
class Metrics:
    kernels: Gauge
    steps: Counter
    tokens: Counter
    padding: Counter


@functools.cache
def metrics() -> Metrics:
    """Returns the metrics and registers them with prometheus_client's default registry at the first call.

    With several API server processes prometheus_client keeps them in files, and vLLM adds them up.
    """
    return Metrics(
        Gauge(
            "npu_gptoss_kernel_info",
            "1 for each kernel that an operation of gpt-oss runs on.",
            (*LABELS, "operation", "kernel", "solution"),
            multiprocess_mode="mostrecent",
        ),
        Counter(
            "npu_gptoss_steps",
            "Model steps; bucket is the number of tokens that the replayed graph was captured with.",
            (*LABELS, "mode", "bucket"),
        ),
        Counter("npu_gptoss_tokens", "Rows that steps computed for requests.", (*LABELS, "mode")),
        Counter("npu_gptoss_padding_tokens", "Rows that steps computed as padding.", (*LABELS, "mode")),
    )


@functools.cache
def refusals() -> Counter:
    """Counts in the server's process: vLLM's own counter, http_requests_total, does not see admission's refusals."""
    return Counter(
        "npu_gptoss_refused_requests", "Requests refused before they reached vLLM, by HTTP status.", ("status",)
    )


class StatLogger(StatLoggerBase):
    """Counts the steps of an engine that serves gpt-oss with this plugin; does nothing for other engines."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self._labels = (vllm_config.model_config.served_model_name, str(engine_index))
        self._shown: Kernels = ()
        supported = envs.get("NPU_GPTOSS") and release_of(installed_vllm()) is not None
        ours = supported and vllm_config.model_config.hf_config.model_type == MODEL_TYPE
        self._active = ours and counts_steps(vllm_config)
        if self._active:  # series exist before their first event, so that rates see it
            for mode in MODES:
                metrics().tokens.labels(*self._labels, mode)
                metrics().padding.labels(*self._labels, mode)
            metrics().steps.labels(*self._labels, EAGER, NO_BUCKET)

    def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
        """Called by vLLM for each output of the engine; later arguments differ between releases."""
        step = step_of(scheduler_stats) if self._active else None
        if step is not None:
            self._count(step)

    def _count(self, step: Step) -> None:
        bucket = str(step.bucket) if step.bucket else NO_BUCKET
        metrics().steps.labels(*self._labels, step.mode, bucket).inc()
        metrics().tokens.labels(*self._labels, step.mode).inc(step.tokens)
        metrics().padding.labels(*self._labels, step.mode).inc(step.padding)
        if step.kernels != self._shown:
            self._shown = step.kernels or self._shown
            for names in step.kernels:
                metrics().kernels.labels(*self._labels, *names).set(1)

    def log_engine_initialized(self) -> None:
        """Does nothing."""
