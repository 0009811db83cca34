"""Reports a step's mode, padding and kernels at /metrics (`serving/steps.py`); a logger that fails ends nothing."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

from npu_gptoss import envs
from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving import logger, steps
from npu_gptoss.serving.compat.patch import Mismatch, Original, around, either, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ALL, ASCEND_RUNNER, LOGGERS, RUNNER, RUNNER_0_33

RECEIVER = "stat-logger"  # the repair that takes the steps out of the statistics again
OBSERVER = "_npu_gptoss_observer"
CANNED = "npu-gptoss-canary-"  # requests of `serving/canary.py`


@repair(RECEIVER, f"{LOGGERS}:StatLoggerManager.__init__", upstream="vllm PR 22456, in 0.11.1", until="0.23")
def install_stat_logger(module: ModuleType) -> None:
    """vLLM does not load a plugin's stat loggers, so /metrics lacks kernels, replays and padding."""
    manager = module.StatLoggerManager
    # ours comes first, before vLLM's own loggers see the statistics
    expect_source(manager.__init__, "factories.extend(custom_stat_loggers)", "logger_factory(vllm_config, engine_idx)")
    expect_source(manager.record, "logger.record(scheduler_stats, iteration_stats, engine_idx)")

    @around(manager, "__init__")
    def __init__(
        original: Original,
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


@repair("step-report", f"{RUNNER}:GPUModelRunner.execute_model", upstream="vllm PR 29825", until="0.23")
@repair(
    "step-report-ascend", f"{ASCEND_RUNNER}:NPUModelRunner.execute_model", upstream="vllm-ascend PR 6331", until="0.23"
)
def install_report(module: ModuleType) -> None:
    """The worker reports neither the graph that a step replayed nor its padding rows."""
    if RECEIVER in envs.get("NPU_GPTOSS_SKIP_PATCHES"):
        raise Mismatch(f"the patch {RECEIVER} is left out, so the steps would stay in the statistics")
    runner = getattr(module, either(module, "NPUModelRunner", "GPUModelRunner"))
    dispatcher = "aclgraph_dispatcher" if runner.__name__ == "NPUModelRunner" else "cudagraph_dispatcher"
    expect_source(runner.execute_model, f"self.{dispatcher}.dispatch(batch_descriptor)")

    @around(runner, "execute_model")
    def execute_model(original: Original, self: Any, scheduler_output: Any, intermediate_tensors: Any = None) -> Any:
        # the canary's steps, and the empty one that ends them, come before its wrapper of the dispatcher is gone
        served = any(not name.startswith(CANNED) for name in scheduler_output.num_scheduled_tokens)
        if not served or self.model_config.hf_config.model_type != MODEL_TYPE:
            return original(self, scheduler_output, intermediate_tensors)
        observer = vars(self).get(OBSERVER)
        if observer is None:  # at the first step: other wrappers of the dispatcher are in place, captures are over
            from npu_gptoss.serving.releases.steps_0_11 import StepObserver

            observer = StepObserver(getattr(self, dispatcher), _selected_kernels)
            setattr(self, OBSERVER, observer)
        return observer.observe(
            lambda: original(self, scheduler_output, intermediate_tensors), scheduler_output.total_num_scheduled_tokens
        )


FREE_FIELD = "vLLM's statistics have a free field for a plugin"


@repair("kernel-report", f"{ASCEND_RUNNER}:CUDAGraphStat", releases="0.23", until=FREE_FIELD)
@repair("kernel-report", f"{RUNNER_0_33}:make_cudagraph_stats", releases="0.33", until=FREE_FIELD)
def install_kernel_report(module: ModuleType) -> None:
    """The statistics of a step have no field for the kernels, so /metrics does not show a slow kernel."""
    making = either(module, "make_cudagraph_stats", "CUDAGraphStat")  # a function, or the class itself
    expect_parameters(module.CUDAGraphStat, "num_unpadded_tokens", "num_padded_tokens", "num_paddings", "runtime_mode")
    with_kernels = steps.kernel_report(_selected_kernels)

    @around(module, making)
    def counted(original: Original, *arguments: Any, **keywords: Any) -> Any:
        told = original(*arguments, **keywords)
        return dataclasses.replace(told, runtime_mode=with_kernels(told.runtime_mode))


def _selected_kernels() -> steps.Kernels:
    from npu_gptoss.kernels import selected_kernels

    return selected_kernels()


@repair(
    "statistics-errors",
    f"{LOGGERS}:StatLoggerManager.record",
    releases=ALL,
    until="vLLM's output handler outlives its loggers",
)
def install_statistics(module: ModuleType) -> None:
    """If a statistics logger rejects a number of one request, the task that answers all requests ends."""
    manager = module.StatLoggerManager

    @around(manager, "record")
    def record(original: Original, self: Any, *arguments: Any, **keywords: Any) -> None:
        try:
            original(self, *arguments, **keywords)
        except Exception:
            logger.exception("The statistics of a step are lost.")
