"""Each registered kernel of an operation, alone, at gpt-oss's shapes: its time beside the floor of the same work.

What can run a case is told by the registry, as selection does it; the fp32 reference is left out unless it is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.bench.measure import Timing, measure
from npu_gptoss.bench.profile import DeviceKernel, as_records, device_kernels
from npu_gptoss.bench.roofline import Ceilings, Work, beside_floor
from npu_gptoss.bench.session import significant
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import KernelSpec, Operation, Priority, Signature, current_platform
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import explain, reasons_against

DEFINITIONS = {
    "us": "median microseconds of one call over samples of a rotation of calls with tensors of their own, enough of "
    "them that none is found in the L2 cache; as a replayed CUDA graph where `method` says so",
    "floor_us": "the larger of bytes / bandwidth and operations / arithmetic rate at the first of `ceilings`; "
    "floor_measured_us: at those measured in the same run",
    "bytes": "attention: visible keys and values, in a prefill also queries and results; experts: weights and biases "
    "of the distinct ones; others: weights, inputs and results, each once",
    "flops": "two a multiply-add of every product; four a visible (query, key, channel), of which a causal prefill of "
    "n tokens has n * n / 2 keys and a window layer n * 128",
    "TBps": "bytes / time",
    "TFLOPs": "flops / time",
    "percent_of_floor": "100 * floor / time",
    "selected": "whether this is the kernel that a call of the case gets",
    "inside": "the device's kernels in one call, from torch's profiler: name, calls, microseconds in all",
}


@dataclass(frozen=True)
class Case:
    """One operation at one shape. `calls(kernel)` builds the rotation that runs the kernel of that name."""

    operation: Operation
    name: str
    signature: Signature
    traits: Mapping[str, Any]
    work: Work
    calls: Callable[[str], list[Callable[[], object]]]


@dataclass(frozen=True)
class Skipped:
    """A kernel that did not run a case, and why."""

    kernel: str
    case: str
    reason: str


def runnable(case: Case, wanted: Sequence[str] | None) -> tuple[list[KernelSpec], list[Skipped]]:
    """The kernels that can run a case here, highest priority first; and the others with their reasons.

    wanted: names of kernels or solutions; None: all but the definition.
    """
    kernels, skipped = [], []
    for kernel in registry.kernels_of(case.operation):
        if wanted is not None and kernel.name not in wanted and kernel.solution not in wanted:
            continue
        reasons = reasons_against(kernel, case.signature, case.traits, current_platform())
        if reasons:
            skipped.append(Skipped(kernel.name, case.name, "; ".join(reasons)))
        elif kernel.priority == Priority.REFERENCE and wanted is None:
            skipped.append(Skipped(kernel.name, case.name, "the definition, not made for speed; name it to measure it"))
        else:
            kernels.append(kernel)
    return kernels, skipped


def run_kernels(
    cases: Iterable[Case],
    device: torch.device,
    *,
    wanted: Sequence[str] | None,
    nominal: Ceilings,
    measured: Ceilings | None,
    samples: int,
) -> Iterator[dict[str, Any] | Skipped]:
    """A record for every case and kernel that can run it, in order; and what was skipped."""
    for case in cases:
        kernels, skipped = runnable(case, wanted)
        yield from skipped
        selected = explain(case.operation, case.signature, case.traits).selected
        for kernel in kernels:
            try:
                calls = case.calls(kernel.name)
                timing = measure(calls, device, samples=samples)
                inside = _inside(calls, device)
            except (InputError, torch.OutOfMemoryError) as error:
                yield Skipped(kernel.name, case.name, str(error).splitlines()[0])
                continue
            finally:
                calls = []
                if device.type == "cuda":
                    torch.cuda.empty_cache()
            yield kernel_record(case, kernel, timing, inside, nominal, measured, selected=kernel is selected)


def kernel_record(
    case: Case,
    kernel: KernelSpec,
    timing: Timing,
    inside: list[DeviceKernel],
    nominal: Ceilings,
    measured: Ceilings | None,
    *,
    selected: bool,
) -> dict[str, Any]:
    """One kernel's time beside the floor, as `records` wants it."""
    record: dict[str, Any] = {
        "operation": case.operation.name,
        "kernel": kernel.name,
        "case": case.name,
        "selected": selected,
        "us": timing.median_s * 1e6,
        "min_us": timing.min_s * 1e6,
        "spread": timing.spread,
        "samples": timing.samples,
        "method": timing.method,
        **beside_floor(case.work, timing.median_s, nominal, measured, "us"),
    }
    record = {name: significant(value) for name, value in record.items()}
    record["inside"] = as_records(inside, most=8)
    return record


def kernel_line(record: Mapping[str, Any]) -> str:
    """One row of the printed table."""
    mark, peer = "*" if record["selected"] else " ", record.get("peer")
    text = (
        f"{mark}{record['kernel']:<44} {record['case']:<34} {record['us']:>10.2f} {record['floor_us']:>9.2f} "
        f"{record['percent_of_floor']:>6.1f}% {record['TBps']:>6.3f} {record['TFLOPs']:>8.2f}"
    )
    return text + (f"  {peer['engine']}: {peer['us']:.2f} us" if peer else "")


KERNEL_HEAD = (
    f" {'kernel (* selected)':<44} {'case':<34} {'us':>10} {'floor us':>9} {'floor':>7} {'TB/s':>6} {'TFLOP/s':>8}"
)


def _inside(calls: list[Callable[[], object]], device: torch.device) -> list[DeviceKernel]:
    """The device's kernels of one call; nothing on a CPU, where an operator is not a launch."""
    if device.type != "cuda":
        return []
    return device_kernels(calls[0], device)
