"""Lists the device's kernels inside a piece of work, from torch's profiler. On a CPU, torch's operators instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from npu_gptoss.bench.measure import synchronize

NAME_LENGTH = 90  # of a kernel's name as reported: template arguments can take thousands of characters
REPEATS = 3
MOST = 16  # kernels in a record and in a table


def device_kernels(run: Callable[[], object], device: torch.device) -> list[dict[str, Any]]:
    """The kernels of one `run`, as the mean of REPEATS."""
    run()
    synchronize(device)
    with recording(device) as recorded:
        for _ in range(REPEATS):
            run()
        synchronize(device)
    return kernels_of(recorded, device, REPEATS)


def recording(device: torch.device) -> profile:
    """A profiler of the device's kernels; a context manager, or `start` and `stop`."""
    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def kernels_of(recorded: profile, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """The name, calls and microseconds of the longest recorded kernels, divided by the number of repeats."""
    time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in recorded.key_averages() if getattr(event, time) > 0]
    if device.type == "cuda":
        events = [event for event in events if str(event.device_type).endswith("CUDA")]
    return [
        {
            "name": event.key[:NAME_LENGTH],
            "calls": round(event.count / repeats, 2),
            "us": round(getattr(event, time) / repeats, 2),
        }
        for event in sorted(events, key=lambda event: -getattr(event, time))[:MOST]
    ]


def table(kernels: Sequence[dict[str, Any]]) -> str:
    """Microseconds, calls and name of each kernel, for --profile."""
    lines = [f"{'us':>10} {'calls':>7}  kernel"]
    return "\n".join([*lines, *(f"{each['us']:10.1f} {each['calls']:7.1f}  {each['name']}" for each in kernels)])
