"""Reports a step's mode, padding and kernels at /metrics, for gpt-oss only. See `serving/steps.py`."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving import steps
from npu_gptoss.serving.compat.patch import Mismatch, around, expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import ASCEND_RUNNER, LOGGERS, RUNNER, RUNNER_0_33, SCHEDULER

RECEIVER = "stat-logger"  # the repair that takes the steps out of the statistics again
OBSERVER = "_npu_gptoss_observer"


@repair(
    "stat-logger",
    f"{LOGGERS}:StatLoggerManager.__init__",
    releases=("0.11",),
    upstream="vllm PR 22456, in 0.11.1",
    until="0.23",
)
def install_stat_logger(module: ModuleType) -> None:
    """vLLM does not load a plugin's stat loggers, so /metrics lacks kernels, replays and padding."""
    manager = module.StatLoggerManager
    expect_parameters(manager, "vllm_config", "engine_idxs", "custom_stat_loggers")
    # ours comes first, before vLLM's own loggers see the statistics
    expect_source(manager.__init__, "factories.extend(custom_stat_loggers)", "logger_factory(vllm_config, engine_idx)")
    expect_source(manager.record, "logger.record(scheduler_stats, iteration_stats, engine_idx)")

    @around(manager, "__init__")
    def __init__(
        original: Callable[..., None],
        self: Any,
        vllm_config: Any,
        engine_idxs: Any = None,
        custom_stat_loggers: Any = None,
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        if vllm_config.model_config.hf_config.model_type == MODEL_TYPE:
            from npu_gptoss.serving.metrics import StatLogger

            others = [factory for factory in custom_stat_loggers or () if factory is not StatLogger]
            custom_stat_loggers = [StatLogger, *others]
        original(self, vllm_config, engine_idxs, custom_stat_loggers, *arguments, **keywords)


@repair(
    "step-statistics",
    f"{SCHEDULER}:Scheduler.update_from_output",
    releases=("0.11",),
    upstream="vllm PR 29825",
    until="0.23",
)
def install_statistics(module: ModuleType) -> None:
    """The scheduler's statistics for /metrics do not say which steps replayed a graph."""
    from npu_gptoss.serving import compat

    scheduler = module.Scheduler
    expect_parameters(scheduler.update_from_output, "scheduler_output", "model_runner_output")
    expect_source(scheduler.update_from_output, "eco.scheduler_stats = stats", "return engine_core_outputs")
    expect_source(scheduler.make_stats, "kv_connector_stats=")
    importlib.import_module(LOGGERS)  # installs the receiver's repair, or leaves it out
    if any(entry.patch.name == RECEIVER and entry.state == "skipped" for entry in compat.status()):
        raise Mismatch(f"the patch {RECEIVER} is left out, so the steps would stay in the statistics")

    @around(scheduler, "update_from_output")
    def update_from_output(
        original: Callable[..., Any], self: Any, scheduler_output: Any, model_runner_output: Any
    ) -> Any:
        outputs = original(self, scheduler_output, model_runner_output)
        step = getattr(model_runner_output, steps.ATTRIBUTE, None)
        if step is not None:
            steps.put(step, outputs)
        return outputs


@repair(
    "step-report", f"{RUNNER}:GPUModelRunner.execute_model", releases=("0.11",), upstream="vllm PR 29825", until="0.23"
)
def install_report(module: ModuleType) -> None:
    """The worker reports neither the graph that a step replayed nor its padding rows."""
    _install(module.GPUModelRunner, "cudagraph_dispatcher")


@repair(
    "step-report-ascend",
    f"{ASCEND_RUNNER}:NPUModelRunner.execute_model",
    releases=("0.11",),
    upstream="vllm-ascend PR 6331",
    until="0.23",
)
def install_ascend_report(module: ModuleType) -> None:
    """Same as step-report, in vllm-ascend's worker."""
    from npu_gptoss.serving.compat.start.ascend import expect_release

    expect_release()
    _install(module.NPUModelRunner, "aclgraph_dispatcher")


def _install(runner: Any, dispatcher: str) -> None:
    expect_parameters(runner.execute_model, "scheduler_output", "intermediate_tensors")
    expect_source(runner.execute_model, f"self.{dispatcher}.dispatch(batch_descriptor)")

    @around(runner, "execute_model")
    def execute_model(
        original: Callable[..., Any], self: Any, scheduler_output: Any, intermediate_tensors: Any = None
    ) -> Any:
        if self.model_config.hf_config.model_type != MODEL_TYPE:
            return original(self, scheduler_output, intermediate_tensors)
        observer = vars(self).get(OBSERVER)
        if observer is None:  # at the first step: other wrappers of the dispatcher are in place, captures are over
            observer = steps.StepObserver(getattr(self, dispatcher), _selected_kernels)
            setattr(self, OBSERVER, observer)
        return observer.observe(
            lambda: original(self, scheduler_output, intermediate_tensors), scheduler_output.total_num_scheduled_tokens
        )


@repair(
    "kernel-report",
    f"{ASCEND_RUNNER}:CUDAGraphStat",
    releases=("0.23",),
    until="vLLM's statistics have a free field for a plugin",
)
def install_kernel_report(module: ModuleType) -> None:
    """The statistics of a step have no field for the kernels, so /metrics does not show a slow kernel."""
    stat = module.CUDAGraphStat
    expect_parameters(stat, "num_unpadded_tokens", "num_padded_tokens", "num_paddings", "runtime_mode")
    with_kernels = steps.kernel_report(_selected_kernels)

    def counted(*, runtime_mode: str, **counts: int) -> Any:
        return stat(runtime_mode=with_kernels(runtime_mode), **counts)

    replace(module, "CUDAGraphStat", counted)


@repair(
    "kernel-report",
    f"{RUNNER_0_33}:make_cudagraph_stats",
    releases=("0.33",),
    until="vLLM's statistics have a free field for a plugin",
)
def install_kernel_report_0_33(module: ModuleType) -> None:
    """The statistics of a step have no field for the kernels, so /metrics does not show a slow kernel."""
    expect_parameters(module.make_cudagraph_stats, "batch_desc", "num_tokens")
    with_kernels = steps.kernel_report(_selected_kernels)

    @around(module, "make_cudagraph_stats")
    def make_cudagraph_stats(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        told = original(*arguments, **keywords)
        return dataclasses.replace(told, runtime_mode=with_kernels(told.runtime_mode))


def _selected_kernels() -> steps.Kernels:
    from npu_gptoss.kernels import selected_kernels

    return selected_kernels()
