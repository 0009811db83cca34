"""What the makers of test inputs share: copies for a device, for the definition, and poisoned memory.

All depths of `verify`, the benchmarks and the tests draw from here. Tensors are made on the device of the generator.
The module does not import the model or the engine, because a server's start draws from it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_gptoss.kernels.dumping import changed

Inputs = Mapping[str, Any]


def widened(inputs: Any) -> Any:
    """A copy with bfloat16 tensors as float32, the input of the definition, and caches too, which may be in FP8."""
    wide = changed(inputs, lambda t: t.float() if t.dtype == torch.bfloat16 else t.clone())
    if isinstance(wide, Mapping):
        wide = {name: value.float() if name in ("key_cache", "value_cache") else value for name, value in wide.items()}
    return wide


def on(inputs: Any, device: torch.device) -> Any:
    """A copy on the device; a kernel that writes in place does not reach the original."""
    return changed(inputs, lambda t: t.clone() if device.type == "cpu" else t.to(device))


def poison(device: torch.device) -> None:
    """Leaves NaN in the memory that the next results will lie in, in blocks of both sizes that the allocator keeps."""
    for count, size in ((1, 64 << 20), (32, 512 << 10)):
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(count)]
        del blocks


def bits(values: torch.Tensor) -> torch.Tensor:
    """The bits of floats, on the CPU: they distinguish -0 from 0."""
    return values.cpu().view(torch.int16 if values.dtype == torch.bfloat16 else torch.int32)
