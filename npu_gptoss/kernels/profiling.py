"""Names each kernel call in a torch profile: `attention.paged.small_ops query=[7, 8, 64] …`.

Costs one flag look-up when no profiler runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler


def kernel_scope(name: str, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A profiler range around a kernel call while a torch profiler is active, else nothing."""
    # The flag is private to torch; where a release lacks it, the range is always opened (about 10 us a call).
    if not getattr(profiler, "_is_profiler_enabled", True):
        return nullcontext()
    shapes = " ".join(
        f"{key}={list(value.shape)}" for key, value in arguments.items() if isinstance(value, torch.Tensor)
    )
    return profiler.record_function(f"{name} {shapes}".rstrip())
