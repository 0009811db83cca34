"""Lists the device's kernels inside a call, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from npu_gptoss.bench.measure import synchronize

NAME_LENGTH = 90  # of a kernel's name as reported: template arguments can take thousands of characters
REPEATS = 3
MOST = 8  # kernels in a record


def device_kernels(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """The name, calls and microseconds of each CUDA kernel of one `run`, longest first, as the mean of REPEATS."""
    run()
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(REPEATS):
            run()
        synchronize(device)
    on_device = [event for event in recorded.key_averages() if str(event.device_type).endswith("CUDA")]
    longest = sorted(on_device, key=lambda event: -event.self_device_time_total)[:MOST]
    return [
        {
            "name": event.key[:NAME_LENGTH],
            "calls": round(event.count / REPEATS, 2),
            "us": round(event.self_device_time_total / REPEATS, 2),
        }
        for event in longest
        if event.self_device_time_total > 0
    ]
