"""The platform that vLLM finds in place of a GPU's."""

from __future__ import annotations

from typing import Any

from vllm.platforms.cpu import CpuPlatform


class WithoutGpu(CpuPlatform):
    """vLLM's platform of CPUs with our worker, in the engine's process, as on one GPU."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        parallel = vllm_config.parallel_config
        backend = parallel.distributed_executor_backend
        parallel.worker_cls = "tests.serving.on_cpu.worker.Worker"
        super().check_and_update_config(vllm_config)
        parallel.distributed_executor_backend = backend

    @classmethod
    def import_kernels(cls) -> None:
        """There are none."""
