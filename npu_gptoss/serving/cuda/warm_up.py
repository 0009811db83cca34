"""Runs our warm-up at vLLM's hook for it, before the server is ready.

vLLM's own warm-up steps have few shapes; without ours, first requests waited for the other kernels to compile.
`--enforce-eager` and `--kernel-config '{"enable_jit_warmup": false}'` skip it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from npu_gptoss.model.warm_up import Reach
from npu_gptoss.serving import logger
from npu_gptoss.serving.releases.vllm import CUDAGraphMode, JitWarmupRegistry, VllmConfig, VllmJitKernel


class WarmUp(VllmJitKernel[Reach]):
    """Our warm-up as a vLLM kernel whose only key is the reach of the server's steps."""

    CompileKey = Reach

    def __init__(self, work: Callable[[Reach], None]) -> None:
        super().__init__()
        self.work = work

    def get_warmup_keys(self, vllm_config: VllmConfig) -> list[Reach]:
        return [reach_of(vllm_config)]

    def compile(self, compile_key: Reach) -> None:
        began = time.monotonic()
        self.work(compile_key)
        logger.info("npu-gptoss launched the kernels of every step in %.1f s.", time.monotonic() - began)


def before_ready(work: Callable[[Reach], None]) -> None:
    """Registers the work with vLLM, which runs it after it allocates caches and before it captures graphs.

    Call it while the model loads.
    """
    JitWarmupRegistry.register(WarmUp(work))


def reach_ahead(config: VllmConfig) -> Reach | None:
    """Returns the reach of steps in graphs and outside; None where nothing is warmed up."""
    if config.model_config.enforce_eager or not config.kernel_config.enable_jit_warmup:
        return None
    return replace(reach_of(config), graph_rows=0)


def reach_of(config: VllmConfig) -> Reach:
    """Returns the limits of the scheduler's steps."""
    scheduler, graphs, speculative = config.scheduler_config, config.compilation_config, config.speculative_config
    drafts = speculative.num_speculative_tokens or 0 if speculative else 0
    mode = graphs.cudagraph_mode
    pieces = mode is not None and mode.mixed_mode() != CUDAGraphMode.NONE
    return Reach(
        rows=scheduler.max_num_batched_tokens,
        decode_rows=min(scheduler.max_num_seqs * (1 + drafts), scheduler.max_num_batched_tokens),
        keys=config.model_config.max_model_len,
        graph_rows=graphs.max_cudagraph_capture_size or 0 if pieces else 0,
    )
