"""Errors of a step in one worker of several, of which the engine hears.

Stock vLLM reads the answer of one worker only. Another that fails says nothing, and the engine waits five minutes for
a neighbour that waits for it within a collective.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving import logger
from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair
from npu_gptoss.serving.compat.targets import ALL, BOTH, WORKERS


@repair("step-results", f"{WORKERS}:WorkerProc.enqueue_output", releases=BOTH, until="0.33")
def install_results(module: ModuleType) -> None:
    """A device's error that shows when results are read is told five minutes later."""
    expect_source(module.WorkerProc.enqueue_output, "output = output.get_output()", "isinstance(output, Exception)")

    @around(module.WorkerProc, "enqueue_output")
    def enqueue_output(original: Original, self: Any, output: Any) -> None:
        if isinstance(output, module.AsyncModelRunnerOutput):
            try:
                output = output.get_output()
            except Exception as error:
                logger.exception("The results of a step could not be read, so the engine ends.")
                output = error
        original(self, output)


@repair(
    "step-errors",
    f"{WORKERS}:WorkerProc.worker_busy_loop",
    releases=ALL,
    upstream="vllm issue 23985",
    until="vLLM hears it",
)
def install_errors(module: ModuleType) -> None:
    """A worker that fails alone is not heard."""
    process, read = module.WorkerProc, "method, args, kwargs, output_rank ="
    expect_source(getattr(process, "_execute_worker_rpc", process.worker_busy_loop), read, "self.rank == output_rank")

    @around(process, "worker_busy_loop")
    def worker_busy_loop(original: Original, self: Any, *arguments: Any, **keywords: Any) -> None:
        receive, answers = self.rpc_broadcast_mq.dequeue, [None]

        def dequeue(*asked: Any, **how: Any) -> Any:
            request = receive(*asked, **how)
            answers[0] = request[3]
            return request

        def heard(step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(step)  # vLLM 0.11 asks for its name
            def run(*asked: Any, **how: Any) -> Any:
                try:
                    return step(*asked, **how)
                except Exception:
                    if answers[0] in (None, self.rank):
                        raise
                    logger.exception("A worker failed a step that another answers, so it ends, and the engine with it.")
                    os._exit(1)  # its neighbours may wait for it within a collective, and no way out may wait for them

            return run

        self.rpc_broadcast_mq.dequeue = dequeue
        for name in ("execute_model", "sample_tokens", "execute_dummy_batch"):
            if hasattr(self.worker, name):
                setattr(self.worker, name, heard(getattr(self.worker, name)))
        original(self, *arguments, **keywords)
