"""Our metrics on /metrics: counted where the model runs, and carried through vLLM's own processes unharmed.

test_openai_api.py compares a live server's with vLLM's own counters; graphs are replayed by the server
of tests/scripts/test_serve_emulated.py.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.loggers import LoggingStatLogger, StatLoggerBase, StatLoggerManager
from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from npu_gptoss.serving import metrics
from npu_gptoss.serving.compat.patch import Mismatch
from npu_gptoss.serving.releases.steps_0_11 import KEY, StepObserver, StepStats, take
from npu_gptoss.serving.steps import Step
from tests.serving.compat.conftest import patched  # noqa: F401

pytestmark = pytest.mark.serving

KERNELS = (("moe.route", "moe.route.small_ops", "small_ops"),)
STEP = Step("piecewise", 8, 5, 3, KERNELS)


def model_output(*request_ids: str) -> ModelRunnerOutput:
    return ModelRunnerOutput(list(request_ids), {}, [], None, {}, [])


def carried(output: ModelRunnerOutput) -> Step | None:
    """Returns the step that vLLM's scheduler finds in a worker's output."""
    told = output.kv_connector_output
    return take(SchedulerStats(kv_connector_stats=told.kv_connector_stats.data)) if told else None


class Dispatcher:
    """As vLLM's: the graph of the smallest captured size is its own size."""

    def __init__(self, mode: str = "PIECEWISE") -> None:
        self.mode = mode

    def dispatch(self, descriptor: Any) -> tuple[Any, Any]:
        return SimpleNamespace(name=self.mode), descriptor


def observed(observer: StepObserver, dispatcher: Dispatcher, rows: int, tokens: int) -> Step | None:
    def execute() -> ModelRunnerOutput:
        dispatcher.dispatch(SimpleNamespace(num_tokens=rows))
        return model_output("request")

    return carried(observer.observe(execute, tokens))


@pytest.mark.parametrize(
    ("mode", "rows", "tokens", "expected"),
    [
        ("NONE", 70, 70, Step("eager", 0, 70, 0)),
        ("NONE", 72, 70, Step("eager", 0, 70, 2)),  # data parallelism: as many rows as the busiest engine has
        ("PIECEWISE", 8, 5, Step("piecewise", 8, 5, 3)),
        ("FULL", 4, 4, Step("full", 4, 4, 0)),
    ],
)
def test_a_step_has_the_dispatchers_mode_not_the_configured_one(mode, rows, tokens, expected):
    dispatcher = Dispatcher(mode)
    observer = StepObserver(dispatcher, tuple)
    assert observed(observer, dispatcher, rows, tokens) == expected


def test_kernels_are_sent_when_they_change_and_not_at_every_step():
    dispatcher, selected = Dispatcher(), list(KERNELS)
    observer = StepObserver(dispatcher, lambda: tuple(selected))
    assert observed(observer, dispatcher, 1, 1).kernels == KERNELS
    assert observed(observer, dispatcher, 1, 1).kernels == ()
    selected.append(("attention.paged", "attention.paged.small_ops", "small_ops"))
    assert observed(observer, dispatcher, 1, 1).kernels == tuple(selected)


def test_captures_and_warm_ups_before_a_step_are_not_counted_as_the_step():
    dispatcher = Dispatcher()
    observer = StepObserver(dispatcher, tuple)
    dispatcher.dispatch(SimpleNamespace(num_tokens=64))  # a dummy run
    observer.observe(lambda: EMPTY_MODEL_RUNNER_OUTPUT, 0)
    assert carried(EMPTY_MODEL_RUNNER_OUTPUT) is None, "one object for all empty outputs: it would say it forever"
    output = observer.observe(lambda: model_output("request"), 1)
    assert carried(output) is None


def test_the_output_of_asynchronous_scheduling_carries_its_step():
    dispatcher = Dispatcher()
    observer = StepObserver(dispatcher, tuple)
    wrapped = SimpleNamespace(_model_runner_output=model_output("request"))

    def execute() -> Any:
        dispatcher.dispatch(SimpleNamespace(num_tokens=2))
        return wrapped

    assert observer.observe(execute, 1) is wrapped
    assert carried(wrapped._model_runner_output) == Step("piecewise", 2, 1, 1)


def statistics(step: Step) -> SchedulerStats:
    return SchedulerStats(kv_connector_stats={KEY: dataclasses.asdict(step)})


def test_a_step_survives_both_of_vllms_serialisers():
    """From worker to engine core by pickle, from there to the API server by msgpack with vLLM's types."""
    output = pickle.loads(
        pickle.dumps(KVConnectorOutput(kv_connector_stats=StepStats(statistics(STEP).kv_connector_stats)))
    )
    manager = SimpleNamespace(usage=0.0, make_prefix_cache_stats=PrefixCacheStats)
    scheduler = SimpleNamespace(log_stats=True, kv_cache_manager=manager, running=[], waiting=[1, 2, 3])
    stats = Scheduler.make_stats(scheduler, None, output.kv_connector_stats)
    outputs = EngineCoreOutputs(scheduler_stats=stats)
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(outputs)).scheduler_stats
    assert take(received) == STEP
    assert received.num_waiting_reqs == 3
    assert received.kv_connector_stats is None, "vLLM's own loggers would read the rest"


def test_a_connectors_statistics_do_not_change():
    stats = SchedulerStats(kv_connector_stats={"transfers": [1, 2]} | statistics(STEP).kv_connector_stats)
    assert take(stats) == STEP
    assert stats.kv_connector_stats == {"transfers": [1, 2]}
    assert take(stats) is None
    assert take(None) is None


def config(model_type: str = "gpt_oss", name: str = "test-metrics") -> Any:
    model = SimpleNamespace(served_model_name=name, hf_config=SimpleNamespace(model_type=model_type), max_model_len=64)
    return SimpleNamespace(
        model_config=model,
        kv_transfer_config=None,
        observability_config=SimpleNamespace(show_hidden_metrics=False),
        speculative_config=None,
        lora_config=None,
    )


def value(name: str, model: str = "test-metrics", engine: int = 0, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": model, "engine": str(engine), **labels})


def test_series_exist_before_their_first_step_so_that_a_rate_sees_it():
    metrics.StatLogger(config(name="fresh"), 1)
    assert value("npu_gptoss_steps_total", "fresh", 1, mode="eager", bucket="none") == 0
    for mode in ("eager", "piecewise", "full"):
        assert value("npu_gptoss_tokens_total", "fresh", 1, mode=mode) == 0
        assert value("npu_gptoss_padding_tokens_total", "fresh", 1, mode=mode) == 0


def test_each_engine_has_separate_counts():
    loggers = [metrics.StatLogger(config(name="two"), engine) for engine in (0, 1)]
    for engine, step in ((0, STEP), (1, STEP), (1, STEP), (1, Step("eager", 0, 40, 0))):
        loggers[engine].record(statistics(step), None, engine)
    for engine, steps in ((0, 1), (1, 2)):
        assert value("npu_gptoss_steps_total", "two", engine, mode="piecewise", bucket="8") == steps
        assert value("npu_gptoss_tokens_total", "two", engine, mode="piecewise") == 5 * steps
        assert value("npu_gptoss_padding_tokens_total", "two", engine, mode="piecewise") == 3 * steps
        operation, kernel, solution = KERNELS[0]
        labels = {"operation": operation, "kernel": kernel, "solution": solution}
        assert value("npu_gptoss_kernel_info", "two", engine, **labels) == 1
    assert value("npu_gptoss_steps_total", "two", 1, mode="eager", bucket="none") == 1
    assert value("npu_gptoss_tokens_total", "two", 0, mode="eager") == 0


def test_the_calls_of_later_releases_are_understood():
    """vLLM ≥ 0.11.1 loads the class and passes the engine and further statistics by name."""
    (entry,) = importlib.metadata.entry_points(group="vllm.stat_logger_plugins", name="npu_gptoss") or [
        pytest.skip("npu-gptoss was installed before it had this entry point: make setup")
    ]
    assert entry.load() is metrics.StatLogger
    assert issubclass(metrics.StatLogger, StatLoggerBase)
    logger = metrics.StatLogger(config(name="later"), engine_index=0)
    logger.record(statistics(STEP), None, mm_cache_stats=None, engine_idx=0)
    assert value("npu_gptoss_steps_total", "later", mode="piecewise", bucket="8") == 1


@pytest.mark.parametrize(("model_type", "release"), [("llama", "0.11.0"), ("gpt_oss", "0.25.1")])
def test_nothing_is_shown_for_another_model_or_release(model_type, release, monkeypatch):
    monkeypatch.setattr(metrics, "installed_vllm", lambda: release)
    logger = metrics.StatLogger(config(model_type, "other"), 0)
    logger.record(SchedulerStats(), None, 0)
    assert value("npu_gptoss_tokens_total", "other", mode="eager") is None


class Nothing:
    """In the place of vLLM's Prometheus metrics, which want a whole configuration."""

    def __init__(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


def test_our_logger_comes_before_vllms_which_cannot_read_a_step(patched, monkeypatch, caplog):  # noqa: F811
    """vLLM's own logger takes all of kv_connector_stats for a connector's."""
    with patched("stat-logger"), monkeypatch.context() as context:
        context.setattr("vllm.v1.metrics.loggers.PrometheusStatLogger", Nothing)
        ours, others = (StatLoggerManager(config(kind, "order"), [0]) for kind in ("gpt_oss", "llama"))
        twice = StatLoggerManager(config("gpt_oss", "twice"), [0], [metrics.StatLogger])  # as releases from 0.11.1 do
    assert [type(logger) for logger in twice.per_engine_logger_dict[0]].count(metrics.StatLogger) == 1
    kinds = [type(logger) for logger in ours.per_engine_logger_dict[0]]
    assert kinds == [metrics.StatLogger, LoggingStatLogger]
    assert [type(logger) for logger in others.per_engine_logger_dict[0]] == [LoggingStatLogger]
    ours.record(statistics(STEP), None, 0)
    caplog.clear()
    others.record(statistics(STEP), None, 0)  # what the order protects from; the barrier keeps it from the requests
    assert "AttributeError" in caplog.text


def test_without_the_receiver_nothing_is_sent(patched, monkeypatch):  # noqa: F811
    monkeypatch.setenv("NPU_GPTOSS_SKIP_PATCHES", "stat-logger")
    with pytest.raises(Mismatch, match="the patch stat-logger is left out"), patched("step-report"):
        pass
