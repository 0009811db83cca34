"""CPU: a vLLM 0.11 without compiled operators, or with a newer torch than it was built for.

vLLM 0.11.0 built with `VLLM_TARGET_DEVICE=empty` has no `vllm._C`, and a binary build's does not load with another
torch. Every operator of vLLM has a plain torch body, chosen with `custom_ops=["none"]`. The worker pins its threads
with an operator of the same library unless `VLLM_CPU_OMP_THREADS_BIND` says "all", once per rank. 0.11.0's use of
torch.compile fits the dynamo of torch 2.8 at the latest; its sampler compiles a function at the first request with a
temperature, which ends the engine if there is no C++ compiler.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

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


def choose_operators(config: VllmConfig) -> None:
    """Chooses what this installation can run. Call it before vLLM chooses a level of compilation."""
    if torch_release() > NEWEST_TORCH_THAT_COMPILES:
        from vllm.config import CompilationLevel

        config.compilation_config.level = CompilationLevel.NO_COMPILATION
        config.model_config.enforce_eager = True
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # read when a function is about to be compiled
    if not has_compiled_ops():
        config.compilation_config.custom_ops = ["none"]
        ranks = config.parallel_config.world_size * config.parallel_config.data_parallel_size
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "|".join(["all"] * ranks))
