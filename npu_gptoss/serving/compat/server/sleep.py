"""/sleep that could not be undone, and steps of an engine that sleeps (vLLM 0.11 and 0.23, which serve on Ascend).

Level 1 keeps the weights in the host's memory. Any other throws them away, and a running server on Ascend cannot load
them again: after /wake_up it would compute with what memory held.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import Any

from npu_gptoss.serving.admission.refusal import Refusal
from npu_gptoss.serving.compat.engine.failed_requests import PAUSED, PAUSES, end_reported, failures_of, report
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import ASYNC, BOTH, CORE

ASCEND = "vllm_ascend.worker"
UNTIL = "vllm-ascend refuses a sleep without return"


def objection(config: Any, level: int, *, pauses: bool) -> str:
    """Returns why a server must not sleep at this level; empty if it may. config: VllmConfig."""
    if pauses and level == 0:
        return ""
    if not config.model_config.enable_sleep_mode:
        return "This server cannot sleep: it was started without --enable-sleep-mode."
    option = (config.additional_config or {}).get("weight_nz_mode", os.environ.get("VLLM_ASCEND_ENABLE_NZ", "1"))
    if str(option) not in ("0", ""):
        said = "This server cannot sleep: with weights in FRACTAL_NZ vllm-ascend does not wake up again."
        return f"{said} Start it with VLLM_ASCEND_ENABLE_NZ=0."
    return "" if level == 1 else f"level: expected 1, which keeps the weights, got {level}: they could not be restored."


@repair("sleep", f"{ASYNC}:AsyncLLM.sleep", releases=BOTH, until=UNTIL)
def install(module: ModuleType) -> None:
    """The answer of /sleep without --enable-sleep-mode, and where there is no way back, is 200 or an error without
    words."""
    from vllm.v1.engine.core import EngineCore

    expect_source(module.AsyncLLM.sleep, "await self.engine_core.sleep_async(level")

    @around(module.AsyncLLM, "sleep")
    async def sleep(original: Original, self: Any, level: int = 1, *more: Any, **named: Any) -> None:
        if said := objection(self.vllm_config, level, pauses=hasattr(EngineCore, PAUSES)):
            raise Refusal(said, "level")
        await original(self, level, *more, **named)


@repair("engine-sleep", f"{CORE}:EngineCore.sleep", releases=BOTH, until=UNTIL)
def install_engine(module: ModuleType) -> None:
    """An engine that is put to sleep at a level without return computes wrong text after it; 0.23's stays paused if its
    worker cannot sleep, 0.11's ends with the next step of a request that is running."""
    core = module.EngineCore
    pauses = hasattr(core, PAUSES)
    expect_source(core.sleep, "model_executor.sleep(level)")

    @around(core, "sleep")
    def sleep(original: Original, self: Any, level: int = 1, *more: Any, **named: Any) -> Any:
        if said := objection(self.vllm_config, level, pauses=pauses):
            raise ValueError(said)
        if not pauses:
            for request in list(self.scheduler.requests.values()):
                report(failures_of(self.structured_output_manager), request, f"{PAUSED}; it ended this request.")
            end_reported(self)
            self.reset_prefix_cache()  # before, running requests kept it
        return original(self, level, *more, **named)


@repair(
    "wake-up", f"{CORE}:EngineCore.resume_scheduler DPEngineCoreProc.resume_scheduler", releases="0.23", until="0.33"
)
def install_wake_up(module: ModuleType) -> None:
    """/wake_up?tags=weights, another tag, and /resume let an engine whose cache still sleeps go on: the next step ends
    it. Data parallel ones take requests for the begin of a wave, and stay paused when all is awake."""
    expect_source(module.EngineCore.wake_up, "self.model_executor.wake_up(tags)", "self.resume_scheduler()")

    def resume_scheduler(original: Original, self: Any) -> None:
        if not self.model_executor.is_sleeping:
            original(self)

    for core in (module.EngineCore, module.DPEngineCoreProc):
        around(core, "resume_scheduler")(resume_scheduler)


@repair("wake-up-cache", f"{ASCEND}.worker:NPUWorker.wake_up", releases="0.23", until="vllm-ascend zeroes it")
@repair("wake-up-cache", f"{ASCEND}.worker_v1:NPUWorker.wake_up", until="vllm-ascend zeroes it")
def install_cache(module: ModuleType) -> None:
    """The KV cache of a woken worker is what memory held, not zeros as at the start: padding rows read it, and a NaN
    there leaves their experts undefined."""
    worker = module.NPUWorker
    expect_source(worker.wake_up, "allocator.wake_up(tags=tags)")
    from npu_gptoss.serving.canary import caches

    @around(worker, "wake_up")
    def wake_up(original: Original, self: Any, tags: list[str] | None = None) -> None:
        original(self, tags)
        if tags is None or "kv_cache" in tags:
            for cache in caches(self.model_runner):
                cache.zero_()
