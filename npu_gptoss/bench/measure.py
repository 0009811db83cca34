"""Times calls: warmed up, many times, on caches that are as cold as in a model.

On CUDA the calls of a rotation are captured into one graph, which is replayed, so that the time is the device's and not
Python's. A call that cannot be captured, because it waits for the device, is timed with events around a loop, and the
result says so. Each call of a rotation has separate tensors; a rotation that touches more than the cache holds finds
none of them there. On other devices the host's clock is read around the loop.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

WARM_UP = 3
COLD_FACTOR = 3  # a rotation touches this many times the L2 cache
MIN_SAMPLE_S = 0.2e-3  # shorter samples are lost in the clock's grain
BUDGET_S = 2.0  # of all samples together; slow calls get fewer, but at least three
FEWEST = 3
NAME_LENGTH = 90  # of a kernel's name as reported: template arguments can take thousands of characters
REPEATS = 3  # of a profiled call
MOST = 16  # kernels in a record and in a table


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over samples, the fastest, and the slowest; how it was measured."""

    median_s: float
    min_s: float
    max_s: float
    samples: int
    method: str

    @property
    def spread(self) -> float:
        """(slowest - fastest) / median: differences below it are noise."""
        return (self.max_s - self.min_s) / self.median_s


def timing_of(samples: Sequence[float], method: str) -> Timing:
    return Timing(statistics.median(samples), min(samples), max(samples), len(samples), method)


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def l2_bytes(device: torch.device) -> int:
    """The size of the cache that a rotation must exceed on a CUDA device."""
    return torch.cuda.get_device_properties(device).L2_cache_size


def rotation(bytes_per_call: float, device: torch.device, most: int = 64) -> int:
    """Returns how many sets of tensors a rotation needs so that no cache holds one; 1 on a CPU, which promises none."""
    if device.type != "cuda":
        return 1
    return max(1, min(most, int(COLD_FACTOR * l2_bytes(device) // max(bytes_per_call, 1)) + 1))


def measure(
    calls: Sequence[Callable[[], object]], device: torch.device, *, samples: int = 20, graph: bool = True
) -> Timing:
    """The time of one call, from `samples` runs of the whole rotation `calls`."""

    def run() -> None:
        for call in calls:
            call()

    def timed() -> float:
        start = time.perf_counter()
        run()
        synchronize(device)
        return time.perf_counter() - start

    warm = [timed() for _ in range(WARM_UP)]  # the first one compiles, tunes, plans
    samples = max(min(samples, FEWEST), min(samples, int(BUDGET_S / max(warm[1], 1e-9))))
    cold = f", {len(calls)} sets of tensors" if len(calls) > 1 else ""
    if device.type != "cuda":
        return timing_of([timed() / len(calls) for _ in range(samples)], f"host clock{cold}")
    replay = _captured(run, device) if graph else None
    method = "events around a loop" if replay is None else "CUDA graph, events"
    return timing_of(_event_samples(replay or run, len(calls), samples), f"{method}{cold}")


def measure_ceilings(device: torch.device) -> tuple[float, float]:
    """bytes/s of a large copy (read plus written) and operations/s of a large bfloat16 product, both measured."""
    elements, size = (1 << 30, 8192) if device.type == "cuda" else (1 << 22, 256)
    copied = copy_bandwidth(torch.empty(elements, dtype=torch.int32, device=device).random_())
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    product = measure([functools.partial(torch.matmul, left, right)], device, samples=10)
    return copied, 2 * size**3 / product.median_s


def copy_bandwidth(source: torch.Tensor) -> float:
    """bytes/s, read plus written, of a copy of a large tensor within its device's memory."""
    # not as a graph: a recorded copy of this size goes through a slower engine
    call = functools.partial(torch.empty_like(source).copy_, source)
    copy = measure([call], source.device, samples=10, graph=False)
    return 2 * source.nbytes / copy.median_s


def _captured(run: Callable[[], None], device: torch.device) -> Callable[[], None] | None:
    """A graph of all calls; None when one of them waits for the device, which a capture refuses."""
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            run()
    except RuntimeError:
        torch.cuda.synchronize(device)
        return None
    return graph.replay


def _event_samples(run: Callable[[], None], calls: int, samples: int) -> list[float]:
    """Seconds a call; a sample repeats the rotation until it is long enough for the clock."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def once(repeats: int) -> float:
        start.record()
        for _ in range(repeats):
            run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    repeats = max(1, int(MIN_SAMPLE_S / max(once(1), 1e-6)) + 1)
    return [once(repeats) / repeats / calls for _ in range(samples)]


# --- the device's kernels inside a call, from torch's profiler; on a CPU, torch's operators


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
    """The name, calls and microseconds of the longest recorded kernels, divided by the number of repeats.

    `critical_us`, of a GPU, is a kernel's share of the whole time: from the latest end of the kernels before it to its
    own end. Kernels that overlap (programmatic dependent launch) have together more `us` than that.
    """
    time = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    events = [event for event in recorded.key_averages() if getattr(event, time) > 0]
    critical: Mapping[str, float] | None = None
    if device.type == "cuda":
        events = [event for event in events if str(event.device_type).endswith("CUDA")]
        critical = _critical(recorded)
    return [
        {
            "name": event.key[:NAME_LENGTH],
            "calls": round(event.count / repeats, 2),
            "us": round(getattr(event, time) / repeats, 2),
        }
        | ({} if critical is None else {"critical_us": round(critical[event.key] / repeats, 2)})
        for event in sorted(events, key=lambda event: -getattr(event, time))[:MOST]
    ]


def _critical(recorded: profile) -> Mapping[str, float]:
    """Microseconds of each kernel's name between the latest end before it, or its own start after that, and its end."""
    spans = [
        (event.time_range.start, event.time_range.end, event.key)
        for event in recorded.events()
        if str(event.device_type).endswith("CUDA")
    ]
    shares, latest = Counter[str](), 0.0
    for start, end, name in sorted(spans):
        shares[name] += max(end - max(start, latest), 0.0)
        latest = max(latest, end)
    return shares


def profile_table(kernels: Sequence[dict[str, Any]]) -> str:
    """Microseconds, calls and name of each kernel, for --profile."""
    lines = [f"{'us':>10} {'critical':>10} {'calls':>7}  kernel"]
    rows = (
        f"{each['us']:10.1f} {each.get('critical_us', each['us']):10.1f} {each['calls']:7.1f}  {each['name']}"
        for each in kernels
    )
    return "\n".join([*lines, *rows])
