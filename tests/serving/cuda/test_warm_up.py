"""The warm-up gets the server's settings, and vLLM runs it; no GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace as Having

import pytest

pytest.importorskip("vllm.compilation.breakable_cudagraph", reason="needs vLLM 0.33")

from vllm.config import CUDAGraphMode
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry

from npu_gptoss.model.warm_up import Reach
from npu_gptoss.serving.cuda.warm_up import before_ready, reach_ahead, reach_of


def config_of(mode: CUDAGraphMode, drafts: int = 0) -> Having:
    return Having(
        scheduler_config=Having(max_num_batched_tokens=8192, max_num_seqs=1024),
        compilation_config=Having(cudagraph_mode=mode, max_cudagraph_capture_size=512),
        speculative_config=Having(num_speculative_tokens=drafts) if drafts else None,
        model_config=Having(max_model_len=131072, enforce_eager=False),
        kernel_config=Having(enable_jit_warmup=True),
    )


@pytest.mark.parametrize(
    ("mode", "graph_rows"),
    [
        (CUDAGraphMode.FULL_AND_PIECEWISE, 512),
        (CUDAGraphMode.PIECEWISE, 512),
        (CUDAGraphMode.FULL_DECODE_ONLY, 0),
        (CUDAGraphMode.NONE, 0),
    ],
)
def test_small_steps_are_left_out_only_where_graphs_have_mixed_ones(mode: CUDAGraphMode, graph_rows: int) -> None:
    assert reach_of(config_of(mode)) == Reach(rows=8192, decode_rows=1024, keys=131072, graph_rows=graph_rows)


def test_drafts_to_verify_are_rows_that_decode() -> None:
    assert reach_of(config_of(CUDAGraphMode.NONE, drafts=3)).decode_rows == 4096
    assert reach_of(config_of(CUDAGraphMode.NONE, drafts=15)).decode_rows == 8192, "a step has no more"


def test_programs_of_graphs_are_compiled_ahead_unless_nothing_is_warmed_up() -> None:
    config = config_of(CUDAGraphMode.FULL_AND_PIECEWISE)
    assert reach_ahead(config) == Reach(rows=8192, decode_rows=1024, keys=131072)
    config.kernel_config.enable_jit_warmup = False
    assert reach_ahead(config) is None
    config.kernel_config.enable_jit_warmup, config.model_config.enforce_eager = True, True
    assert reach_ahead(config) is None


def test_vllm_runs_a_registered_warm_up_once() -> None:
    registry, found = JitWarmupRegistry(config_of(CUDAGraphMode.NONE)), []
    with registry.activate():
        before_ready(found.append)
    assert found == [], "the caches are not there yet"
    registry.warmup()
    assert found == [reach_of(config_of(CUDAGraphMode.NONE))]
