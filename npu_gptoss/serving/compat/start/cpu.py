"""CPU: a vLLM without compiled operators, or with a newer torch than it was built for.

vLLM 0.11.0 built with `VLLM_TARGET_DEVICE=empty` has no `vllm._C`, and a binary build's does not load with another
torch. Every operator of vLLM has a plain torch body, chosen with `custom_ops=["none"]`. The worker pins its threads
with an operator of the same library unless `VLLM_CPU_OMP_THREADS_BIND` says "all", once per rank. 0.11.0's use of
torch.compile fits the dynamo of torch 2.8 at the latest; its sampler compiles a function at the first request with a
temperature, which ends the engine if there is no C++ compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

from npu_gptoss.model.config_fields import MODEL_TYPE
from npu_gptoss.serving.compat.patch import around, expect_parameters, repair

if TYPE_CHECKING:
    from vllm.config import VllmConfig

NEWEST_TORCH_THAT_COMPILES = (2, 8)


def has_compiled_ops() -> bool:
    """Returns whether the library of CPU operators exists and loads."""
    try:
        import vllm._C as library
    except (ImportError, OSError):
        return False
    return hasattr(library, "__file__")  # not the empty stand-in of `serving/platform.py`


def torch_release() -> tuple[int, int]:
    import torch

    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@repair("cpu-native-ops", "vllm.platforms.cpu:CpuPlatform.check_and_update_config", until="0.23")
def install_native_ops(module: ModuleType) -> None:
    """A vLLM without compiled CPU operators, or with a newer torch than it was built for, calls missing operators, pins
    threads with them, and compiles with a dynamo that it does not support."""
    platform = module.CpuPlatform
    expect_parameters(platform.check_and_update_config, "vllm_config")

    @around(platform, "check_and_update_config")
    def check_and_update_config(original: Callable[..., None], cls: type, vllm_config: VllmConfig) -> None:
        original(cls, vllm_config)
        model_config = vllm_config.model_config
        if model_config is None or model_config.hf_config.model_type != MODEL_TYPE:
            return
        if torch_release() > NEWEST_TORCH_THAT_COMPILES:
            from vllm.config import CompilationLevel

            vllm_config.compilation_config.level = CompilationLevel.NO_COMPILATION
            model_config.enforce_eager = True
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when a function is about to be compiled
        if not has_compiled_ops():
            vllm_config.compilation_config.custom_ops = ["none"]
            parallel = vllm_config.parallel_config
            ranks = parallel.world_size * parallel.data_parallel_size
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(["all"] * ranks))
