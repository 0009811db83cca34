"""Workers of vLLM 0.23 and 0.33 report their kernels with each step; test_metrics_0_33.py reads the report."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from npu_gptoss.serving.compat.targets import ASCEND_RUNNER, RUNNER_0_33
from npu_gptoss.serving.steps import without_kernels
from tests.serving.compat.of_release import LINE

KERNELS = (("attention.paged", "attention.paged.ascend", "ascend"),)


def reported(mode: Any) -> Any:
    """Returns the statistics of a step of 5 rows in a graph of 8, as the worker makes them."""
    if LINE == "0.33":
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        return importlib.import_module(RUNNER_0_33).make_cudagraph_stats(BatchExecutionDescriptor(mode, 8, None), 5)
    stat = importlib.import_module(ASCEND_RUNNER).CUDAGraphStat
    return stat(num_unpadded_tokens=5, num_padded_tokens=8, num_paddings=3, runtime_mode=str(mode))


@pytest.mark.skipif(LINE == "0.11", reason="0.11 reports kernels with its step statistics")
def test_step_statistics_lack_the_kernels(patched, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr("npu_gptoss.kernels.selected_kernels", lambda: KERNELS)
    with patched("kernel-report"):
        told = reported(CUDAGraphMode.FULL)
    assert without_kernels(told.runtime_mode) == (str(CUDAGraphMode.FULL), KERNELS)
    assert (told.num_unpadded_tokens, told.num_padded_tokens, told.num_paddings) == (5, 8, 3)
