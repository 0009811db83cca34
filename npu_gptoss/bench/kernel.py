"""`bench kernel`: each registered kernel of an operation alone at gpt-oss's shapes, beside the floor of the same work.

The registry says which kernels can run a case. The fp32 reference is left out unless it is named.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import session
from npu_gptoss.bench.cases import CASES, Case, Inputs, Points
from npu_gptoss.bench.measure import device_kernels, measure
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config
from npu_gptoss.bench.roofline import WEIGHT_BYTES, Ceilings, beside_floor
from npu_gptoss.engine.device import kernels_for, limit_threads, resolve_device, resolve_dtype
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import KernelSpec, Priority, current_platform, load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import explain, reasons_against
from npu_gptoss.model.config import GptOssConfig

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
HEAD = f" {'kernel (* selected)':<44} {'case':<34} {'us':>10} {'floor us':>9} {'floor':>7} {'TB/s':>6} {'TFLOP/s':>8}"
OPTIONS = (
    *("--batch", "--context", "--tokens", "--block-size", "--samples"),
    *("--device", "--dtype", "--gpu-price", "--json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", nargs="*", help="for example moe.experts; default: all")
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="only these kernels or solutions")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--size", choices=SHAPES, default="20b", help="published shapes (default: 20b)")
    shape.add_argument("--model", type=Path, metavar="DIR", help="the shapes of a checkpoint's config.json")
    session.add_options(parser, *OPTIONS, context=[1024, 8192], dtype="bfloat16")
    formats = {"nargs": "+", "choices": WEIGHT_BYTES, "default": ["mxfp4"]}
    parser.add_argument("--weights", help="of the experts (default: mxfp4)", **formats)


def run(args: argparse.Namespace) -> int:
    load_kernels()
    session.check_output(args)
    device = resolve_device(args.device)
    config = full_config(args.size) if args.model is None else GptOssConfig.from_directory(args.model)
    limit_threads(config, device)
    inputs = Inputs(config, device, resolve_dtype(args.dtype, config), args.block_size)
    # a point that is named twice is measured once
    points = Points(*(tuple(dict.fromkeys(each)) for each in (args.batch, args.context, args.tokens, args.weights)))
    operations = list(dict.fromkeys(args.operation)) or sorted(CASES)
    if unknown := sorted(set(operations) - CASES.keys()):
        raise InputError(f"there are no cases of an operation {unknown[0]!r}, but of {', '.join(sorted(CASES))}")
    _check_kernels(args.kernel or (), operations)
    ceilings = session.ceilings_of(device)
    session.print_head(DEFINITIONS, device, ceilings, args.gpu_price)
    print(HEAD)
    kept = session.Kept(args, "kernel", DEFINITIONS, device, ceilings)
    reported: set[tuple[str, str]] = set()
    with kernels_for(device):
        for case in (case for name in operations for case in CASES[name](inputs, points)):
            for found in run_kernels(case, device, args.kernel, ceilings, args.samples):
                if isinstance(found, dict):
                    print(line(found), flush=True)
                    kept.add(found)
                elif found not in reported:
                    reported.add(found)
                    print(f" {found[0]}: not measured ({case.name}): {found[1]}", file=sys.stderr)
    if not kept.end():
        raise InputError("no kernel could run any of these cases; standard error says why for each")
    return 0


def _check_kernels(wanted: Iterable[str], operations: Sequence[str]) -> None:
    """Each has to name a kernel or a solution of one of the operations."""
    kernels = [kernel for name in operations for kernel in registry.kernels_of(registry.operations[name])]
    solutions = {kernel.solution for kernel in kernels}
    if unknown := [name for name in wanted if name not in solutions | {kernel.name for kernel in kernels}]:
        raise InputError(
            f"no kernel or solution of {', '.join(operations)} is called {unknown[0]!r}, "
            f"but {', '.join(sorted(solutions))}"
        )


def run_kernels(
    case: Case, device: torch.device, wanted: Sequence[str] | None, ceilings: Sequence[Ceilings], samples: int
) -> Iterator[dict[str, Any] | tuple[str, str]]:
    """A record for every kernel that can run the case, highest priority first; (name, reason) of each other.

    wanted: names of kernels or solutions; None: all but the definition.
    """
    selected = explain(case.operation, *case.described).selected
    for kernel in registry.kernels_of(case.operation):
        if wanted is not None and kernel.name not in wanted and kernel.solution not in wanted:
            continue
        if reasons := reasons_against(kernel, *case.described, current_platform()):
            yield kernel.name, "; ".join(reasons)
        elif kernel.priority == Priority.REFERENCE and wanted is None:
            yield kernel.name, "the definition, not made for speed; name it to measure it"
        else:
            try:
                yield _record(case, kernel, device, ceilings, samples) | {"selected": kernel is selected}
            except (InputError, torch.OutOfMemoryError) as error:
                yield kernel.name, str(error).splitlines()[0]
            finally:
                if device.type == "cuda":
                    torch.cuda.empty_cache()


def _record(
    case: Case, kernel: KernelSpec, device: torch.device, ceilings: Sequence[Ceilings], samples: int
) -> dict[str, Any]:
    """A row of `records`: one kernel's time and its floor."""
    calls = case.calls(kernel.name)
    timing = measure(calls, device, samples=samples)
    record = {
        "operation": case.operation.name,
        "kernel": kernel.name,
        "case": case.name,
        "us": timing.median_s * 1e6,
        "min_us": timing.min_s * 1e6,
        "spread": timing.spread,
        "samples": timing.samples,
        "method": timing.method,
        **beside_floor(case.work, timing.median_s, ceilings, "us"),
    }
    # on a CPU an operator is not a launch
    inside = device_kernels(calls[0], device) if device.type == "cuda" else []
    return {name: session.significant(value) for name, value in record.items()} | {"inside": inside}


def line(record: dict[str, Any]) -> str:
    """One row of the printed table."""
    return (
        "{mark}{kernel:<44} {case:<34} {us:>10.2f} {floor_us:>9.2f} {percent_of_floor:>6.1f}% "
        "{TBps:>6.3f} {TFLOPs:>8.2f}"
    ).format(**record, mark="*" if record["selected"] else " ")
