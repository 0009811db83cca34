"""How fast the device's memory is: a decode step reads the weights of its experts once, so this bounds its speed."""

from __future__ import annotations

import time

import torch

from npu_gptoss.doctor.findings import Finding, not_applicable, ok, warning
from npu_gptoss.doctor.machine import GIB, Device
from npu_gptoss.nominal import memory_bandwidth

LOW = 0.5  # of nominal: below, something is wrong. A copy reaches 0.8 to 0.9 where nothing is.
SECONDS = 0.5


def measure(device: torch.device, free: int) -> float:
    """GB/s that a copy within the device's memory moves, read and written, the best of several rounds."""
    size = (256 << 20) if device.type == "cpu" else GIB
    size = max(1 << 20, min(size, free // 8))
    source = torch.ones(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    wait = (lambda: None) if device.type == "cpu" else torch.get_device_module(device.type).synchronize
    copies = 1 if device.type == "cpu" else 10
    target.copy_(source)
    wait()
    best, end = float("inf"), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        start = time.perf_counter()
        for _ in range(copies):
            target.copy_(source)
        wait()
        best = min(best, (time.perf_counter() - start) / copies)
    return 2 * source.numel() * source.element_size() / best / 1e9


def bandwidth(device: torch.device, seen: Device) -> Finding:
    if seen.emulated:
        return not_applicable("The emulated device's memory is this host's: its speed says nothing of a 910B.")
    speed, known = measure(device, seen.free), memory_bandwidth(seen.name)
    return judged(speed, known, seen)


def judged(speed: float, known: int | None, seen: Device) -> Finding:
    """The finding for a measured speed in GB/s."""
    sentence = f"A copy in the memory of {seen.name} moves {speed:.0f} GB/s"
    if seen.kind == "cpu":
        return ok(f"{sentence}, with {torch.get_num_threads()} thread(s).")
    if known is None:
        return ok(f"{sentence}; its nominal bandwidth is not known here.")
    sentence += f", {speed / known:.0%} of the nominal {known} GB/s"
    if speed < LOW * known:
        return warning(
            f"{sentence}.",
            "See whether another process uses the device (`npu-smi info`, `nvidia-smi`), or whether it is throttled.",
        )
    return ok(f"{sentence}.")
