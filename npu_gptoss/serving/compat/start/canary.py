"""Runs the canary of whole steps (`serving/canary.py`) when a worker has captured its graphs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import Original, around, either, expect_source, repair

WARM_UP, ASCEND = "compile_or_warm_up_model", "vllm_ascend.worker"
UNTIL = "vLLM compares its graphs with eager steps"


@repair("step-canary", f"vllm.v1.worker.gpu_worker:Worker.{WARM_UP}", releases="0.33", until=UNTIL)
@repair("step-canary", f"{ASCEND}.worker:NPUWorker.{WARM_UP}", releases="0.23", until=UNTIL)
@repair("step-canary", f"{ASCEND}.worker_v1:NPUWorker.{WARM_UP}", until=UNTIL)
def install_canary(module: ModuleType) -> None:
    """No release compares a step's graph with the same step without one: on a driver that replays wrongly, text is
    wrong without an error."""
    worker = getattr(module, either(module, "NPUWorker", "Worker"))
    expect_source(worker.execute_model, "self.model_runner.execute_model(")

    @around(worker, WARM_UP)
    def compile_or_warm_up_model(original: Original, self: Any) -> Any:
        from npu_gptoss.serving import canary

        found = original(self)
        canary.run(self)
        return found
