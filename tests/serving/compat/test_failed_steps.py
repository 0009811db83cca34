"""A worker whose step fails is heard, whichever worker answers."""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor import multiproc_executor

from tests.serving.compat.of_release import LINE


@pytest.mark.skipif(LINE == "0.33", reason="vLLM 0.33 tells of them itself")
def test_results_that_cannot_be_read_are_no_silence(patched):
    """A worker's thread reads them behind the device's work, whose errors show there."""

    class Broken(multiproc_executor.AsyncModelRunnerOutput):
        def get_output(self) -> Any:
            raise RuntimeError("507015")

    told: list[Any] = []
    worker = SimpleNamespace(worker_response_mq=SimpleNamespace(enqueue=told.append))
    with patched("step-results"):
        multiproc_executor.WorkerProc.enqueue_output(worker, Broken())
        multiproc_executor.WorkerProc.enqueue_output(worker, "as it was")
    status = multiproc_executor.WorkerProc.ResponseStatus
    assert told == [(status.FAILURE, "507015"), (status.SUCCESS, "as it was")]


@pytest.mark.parametrize("method", ["execute_model", "sample_tokens", "execute_dummy_batch"])
@pytest.mark.parametrize(("answers", "status"), [(0, 1), (1, 3), (None, 3)])
def test_a_failed_step_that_another_worker_answers_ends_its_worker(answers, status, method, patched):
    """Else the engine waits for one that waits within a collective. Status 3 is the end of this loop. A rank without
    requests runs the dummy batch."""

    def fails() -> Any:
        raise RuntimeError("507015")

    told: list[Any] = []
    requests = iter([(method, (), {}, answers)])
    process = SimpleNamespace(
        worker=SimpleNamespace(**{method: fails}), rank=1, handle_output=told.append, mm_receiver_cache=None
    )
    process.rpc_broadcast_mq = SimpleNamespace(dequeue=lambda **_: next(requests))
    if found := getattr(multiproc_executor.WorkerProc, "_execute_worker_rpc", None):  # 0.33
        process._execute_worker_rpc = functools.partial(found, process)
    with patched("step-errors"):
        child = os.fork()
        if child == 0:
            try:
                multiproc_executor.WorkerProc.worker_busy_loop(process)
            except StopIteration:
                os._exit(3 if len(told) == (answers != 0) else 4)
            finally:
                os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
