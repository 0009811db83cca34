"""Pretends that this process has eight H100s: vLLM 0.33 then builds its whole configuration, and computes nothing.

Call `pretend()` before anything imports vLLM's engine. The operators that vLLM asks about at import answer False.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

LIBRARIES = ("_C", "_C_stable_libtorch", "_moe_C", "_moe_C_stable_libtorch", "vllm_flash_attn")


class _Library(ModuleType):
    """Has every name but Python's own; each is a function that returns False."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: False


class _Operators(_Library):
    """Has only the operators that say what the GPU supports; vLLM registers stand-ins for those that compute."""

    def __getattr__(self, name: str) -> Any:
        if "supports" not in name:
            raise AttributeError(name)
        return super().__getattr__(name)


def pretend() -> None:
    import torch

    for name in LIBRARIES:
        sys.modules[f"vllm.{name}"] = _Library(f"vllm.{name}")
    for name in ("_C", "_moe_C"):
        setattr(torch.ops, name, _Operators(name))
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Pretended(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_total_memory = classmethod(lambda cls, device_id=0: 80 << 30)
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_uuid = classmethod(lambda cls, device_id=0: "GPU-0")
        device_count = classmethod(lambda cls: 8)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)

    platforms._current_platform = Pretended()
    from vllm.model_executor.models import registry

    # in this process, and not in one that has no such platform
    inspected = registry._LazyRegisteredModel
    inspected.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())
