"""Where the device's time goes inside a piece of work: its kernels by name, from torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from npu_gptoss.bench.measure import synchronize

NAME_LENGTH = 90  # of a kernel's name as reported: template arguments can take thousands of characters


@dataclass(frozen=True)
class DeviceKernel:
    """One kernel of the device: how often it ran in one piece of work, and how long in all of these runs."""

    name: str
    calls: float
    us: float


def device_kernels(run: Callable[[], object], device: torch.device, *, repeats: int = 3) -> list[DeviceKernel]:
    """The kernels of one `run`, longest first, as the mean of `repeats`. On a CPU, torch's operators instead."""
    run()
    synchronize(device)
    with recording(device) as recorded:
        for _ in range(repeats):
            run()
        synchronize(device)
    return kernels_of(recorded, device, repeats)


def recording(device: torch.device) -> profile:
    """A profiler of the device's kernels; a context manager, or `start` and `stop`."""
    return profile(activities=[ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU])


def kernels_of(recorded: profile, device: torch.device, repeats: int) -> list[DeviceKernel]:
    """The recorded kernels, longest first, divided by the number of repeats."""
    found = []
    for event in recorded.key_averages():
        on_device = str(event.device_type).endswith("CUDA")
        if device.type == "cuda" and not on_device:
            continue
        total = event.self_device_time_total if device.type == "cuda" else event.self_cpu_time_total
        if total > 0:
            found.append(DeviceKernel(event.key[:NAME_LENGTH], event.count / repeats, total / repeats))
    return sorted(found, key=lambda kernel: -kernel.us)


def table(kernels: list[DeviceKernel], most: int = 25) -> list[str]:
    """Lines to print: time, share, calls, name."""
    total = sum(kernel.us for kernel in kernels)
    lines = [f"{'us':>10} {'share':>6} {'calls':>7} {'us/call':>9}  kernel"]
    for kernel in kernels[:most]:
        share, each = 100 * kernel.us / total, kernel.us / kernel.calls
        lines.append(f"{kernel.us:10.1f} {share:5.1f}% {kernel.calls:7.1f} {each:9.2f}  {kernel.name}")
    rest = kernels[most:]
    if rest:
        lines.append(f"{sum(k.us for k in rest):10.1f}        {sum(k.calls for k in rest):7.1f}            the rest")
    lines.append(f"{total:10.1f} 100.0%          in all")
    return lines


def as_records(kernels: list[DeviceKernel], most: int = 16) -> list[dict[str, Any]]:
    """The longest ones for a JSON record."""
    return [{"name": k.name, "calls": round(k.calls, 2), "us": round(k.us, 2)} for k in kernels[:most]]
