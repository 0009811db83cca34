from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from npu_gptoss.bench import measure as module
from npu_gptoss.bench.measure import measure, rotation

CPU = torch.device("cpu")


def test_a_call_of_known_length_is_timed_as_such():
    timing = measure([lambda: time.sleep(0.01)] * 2, CPU, samples=3)
    assert 0.0095 < timing.median_s < 0.02, "the time of one call, not of the rotation"
    assert "2 sets of tensors" in timing.method


def test_slow_calls_get_fewer_samples(monkeypatch):
    monkeypatch.setattr(module, "BUDGET_S", 0.02)
    calls = []
    timing = measure([lambda: (time.sleep(0.01), calls.append(1))], CPU, samples=50)
    assert timing.samples == module.FEWEST
    assert len(calls) == module.WARM_UP + module.FEWEST


def test_a_rotation_exceeds_the_cache(monkeypatch):
    monkeypatch.setattr(module, "l2_bytes", lambda device: 60_000_000)
    cuda = torch.device("cuda")
    assert rotation(10_000_000, cuda) * 10_000_000 > 3 * 60_000_000
    assert rotation(1e9, cuda) == 1
    assert rotation(1, cuda) == 64, "tiny tensors do not make endless rotations"
    assert rotation(1, CPU) == 1


@pytest.mark.cuda
def test_graph_is_timed_where_a_call_can_be_captured_else_a_loop():
    device = torch.device("cuda")
    x = torch.randn(1 << 22, device=device)
    assert measure([lambda: x.mul_(1.0)], device).method.startswith("CUDA graph")
    assert measure([lambda: x.sum().item()], device).method.startswith("events")
    assert measure([lambda: x.mul_(1.0)], device).method.startswith("CUDA graph"), "a refused capture leaves no trace"


@pytest.mark.cuda
def test_a_rotation_reads_from_memory_and_one_buffer_from_the_cache():
    device = torch.device("cuda")
    size = 16 << 20
    buffers = [torch.randn(size // 4, device=device) for _ in range(rotation(size, device))]
    sums = [torch.empty((), device=device) for _ in buffers]
    cold = measure([lambda b=b, s=s: torch.sum(b, dim=0, out=s) for b, s in zip(buffers, sums, strict=True)], device)
    warm = measure([lambda: torch.sum(buffers[0], dim=0, out=sums[0])], device)
    assert cold.median_s > 1.1 * warm.median_s
    assert size / cold.median_s < 5.5e12, "more than any memory of today: the cache was measured"


def test_kernels_of_a_call_are_the_devices_own_and_a_mean(monkeypatch):
    def event(name: str, device: str, count: int, us: float) -> SimpleNamespace:
        return SimpleNamespace(key=name, device_type=f"DeviceType.{device}", count=count, self_device_time_total=us)

    events = [event("short", "CUDA", 3, 6.0), event("aten::mul", "CPU", 3, 99.0), event("x" * 200, "CUDA", 6, 60.0)]
    # "short" begins before the long one has ended: of its 2 us 0.5 are left
    whole = [(0.0, 60.0, "x" * 200, "CUDA"), (58.5, 60.5, "short", "CUDA"), (0.0, 99.0, "aten::mul", "CPU")]
    spans = [
        SimpleNamespace(key=name, device_type=f"DeviceType.{kind}", time_range=SimpleNamespace(start=start, end=end))
        for start, end, name, kind in whole
    ]
    averages = [*events, event("empty", "CUDA", 3, 0.0)]
    recorded = nullcontext(SimpleNamespace(key_averages=lambda: averages, events=lambda: spans))
    monkeypatch.setattr(module, "profile", lambda **_: recorded)
    monkeypatch.setattr(module, "synchronize", lambda device: None)
    assert module.device_kernels(lambda: None, torch.device("cuda")) == [
        {"name": "x" * module.NAME_LENGTH, "calls": 2.0, "us": 20.0, "critical_us": 20.0},
        {"name": "short", "calls": 1.0, "us": 2.0, "critical_us": 0.17},
    ]
