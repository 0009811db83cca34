"""Measure the sizes of kernels' tiles on this GPU at gpt-oss's shapes, and write them as a table.

Each number of a tile is varied in turn. Another value is kept only if it is faster by more than noise and computes the
same. The file is complete after each tile, so the command can be stopped. NPU_GPTOSS_TILES=FILE uses the table. Tiles
of FP8 and BF16 experts stay as before.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from npu_gptoss.bench.cases import CASES, Calls, Case, Inputs, Points
from npu_gptoss.bench.measure import measure
from npu_gptoss.bench.random_checkpoint import full_config
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.errors import InputError
from npu_gptoss.files import check_place, write_atomically
from npu_gptoss.kernels import current_platform, load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.kernels.selection import reasons_against
from npu_gptoss.kernels.tiles import VARIABLE, Row, Table, as_text, table, this_gpu, trial

NOISE = 0.01  # of a time: docs/benchmarking.md
ROUNDING = 0.02  # of a result: sums in another order, as the doctor's self-tests allow it
SAMPLES = 10
BOTH, ONE = ("20b", "120b"), ("20b",)  # they differ in their experts alone

Choices = Mapping[str, Sequence[int]]
DECODE: Choices = {"keys": (32, 64, 128), "warps": (2, 4, 8), "stages": (1, 2, 3, 4)}
PREFILL: Choices = {"rows": (32, 64, 128), "keys": (32, 64, 128), "warps": (4, 8), "stages": (2, 3)}
QKV: Choices = {"inputs": (64, 128, 256), "stages": (3, 4, 5, 6)}
OUTPUT: Choices = {**QKV, "splits": (1, 2, 4)}
SINGLE: Choices = {"deep": (3, 4, 5, 6), "down_deep": (4, 5, 6), "splits": (1, 2, 4), "registers": (128, 168)}
FEW: Choices = {"deep": (3, 4, 5, 6), "registers": (96, 128, 168), "rows": (32, 64, 128)}
MANY: Choices = {"stages": (3, 4, 5, 6, 7)}
TRITON: Choices = {"rows": (64, 128), "warps": (2, 4, 8), "stages": (2, 3, 4, 5)}
DOWN_ONE: Choices = {**TRITON, "splits": (1, 2, 4)}


@dataclass(frozen=True)
class Site:
    """A tile, the kernel that reads it, and the cases that decide. part: the beginning of the cases' names."""

    name: str
    kernel: str
    points: Points
    choices: Choices
    sizes: Sequence[str] = ONE
    part: str = ""


def _experts(name: str, kernel: str, choices: Choices, *tokens: int, sizes: Sequence[str] = BOTH) -> Site:
    return Site(f"moe.{name}", f"moe.experts.{kernel}", Points(tokens, formats=("mxfp4",)), choices, sizes)


def _decode(name: str, choices: Choices, context: int, *batches: int) -> Site:
    points, part = Points(batches, contexts=(context,)), f"decode {name.partition('_')[0]}"
    return Site(f"attention.decode.{name}", "attention.paged.triton_decode", points, choices, part=part)


def _prefill(name: str) -> Site:
    points, part = Points((), prompts=(4096,)), f"prefill {name}"
    return Site(f"attention.prefill.{name}", "attention.paged.triton_prefill", points, PREFILL, part=part)


SITES = (
    _decode("full", {**DECODE, "programs": (256, 512, 1024)}, 8192, 1, 32),
    _decode("window", DECODE, 1024, 1, 32),
    _decode("window_many", DECODE, 1024, 128),
    _prefill("full"),
    _prefill("window"),
    Site("dense.qkv.16", "dense.qkv.gluon", Points((1, 8, 16)), QKV),
    Site("dense.qkv.32", "dense.qkv.gluon", Points((32,)), QKV),
    Site("dense.output.16", "dense.output.gluon", Points((1, 8, 16)), OUTPUT),
    Site("dense.output.32", "dense.output.gluon", Points((32,)), OUTPUT),
    Site("dense.logits.16", "dense.logits.gluon", Points((2, 8, 16)), QKV),
    Site("dense.logits.32", "dense.logits.gluon", Points((32,)), QKV),
    _experts("one", "gluon_one", SINGLE, 1),
    _experts("few.3", "gluon_few", FEW, 3),
    _experts("few.6", "gluon_few", FEW, 6),
    _experts("few.48", "gluon_few", FEW, 8, 32),
    _experts("many.256", "gluon_many", MANY, 4096, sizes=ONE),
    _experts("many.1536", "gluon_many", MANY, 16384, sizes=ONE),
    _experts("mxfp4.few.1.gate_up", "triton_one", TRITON, 1),
    _experts("mxfp4.few.1.down", "triton_one", DOWN_ONE, 1),
    _experts("mxfp4.few.48.gate_up", "triton_few", TRITON, 8, 32),
    _experts("mxfp4.few.48.down", "triton_few", TRITON, 8, 32),
    _experts("mxfp4.few.more.gate_up", "triton_few", TRITON, 64),
    _experts("mxfp4.few.more.down", "triton_few", TRITON, 64),
    _experts("mxfp4.many.512.gate_up", "triton_many", TRITON, 512),
    _experts("mxfp4.many.512.down", "triton_many", TRITON, 512),
    _experts("mxfp4.many.more.gate_up", "triton_many", TRITON, 4096),
    _experts("mxfp4.many.more.down", "triton_many", TRITON, 4096),
)


def best(start: Row, choices: Choices, time: Callable[[Row], float]) -> tuple[Row, float]:
    """The fastest tile, and its share of the time of `start`. time: infinite for a tile that cannot be."""
    chosen, first = start, time(start)
    shortest = first
    for field, values in choices.items():
        for tried in [{**chosen, field: value} for value in values if value != chosen[field]]:
            if (seconds := time(tried)) < shortest * (1 - NOISE):
                chosen, shortest = tried, seconds
    return chosen, shortest / first


def tensors(result: object) -> list[torch.Tensor]:
    """Copies of a call's results."""
    parts = result if isinstance(result, tuple) else (result,)
    return [part.float().clone() for part in parts if isinstance(part, torch.Tensor)]


def same(result: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> bool:
    """The results differ by rounding alone. NaN is no rounding."""
    pairs = zip(result, wanted, strict=True)
    return all(bool((a - b).norm() <= ROUNDING * b.norm()) for a, b in pairs)


def cases_of(site: Site, device: torch.device) -> Iterator[Case]:
    operation = site.kernel.rpartition(".")[0]
    for size in site.sizes:
        inputs = Inputs(full_config(size), device, torch.bfloat16)
        yield from (case for case in CASES[operation](inputs, site.points) if case.name.startswith(site.part))


def timer(
    name: str, calls: Sequence[Calls], device: torch.device, refusals: tuple[type[Exception], ...]
) -> Callable[[Row], float]:
    """The seconds of a call by such a tile; infinite when it computes something else than the first that was timed."""
    wanted: list[list[torch.Tensor]] = []

    def time(tried: Row) -> float:
        with trial(name, tried):
            try:
                results = [tensors(case[0]()) for case in calls]
                if not wanted:
                    wanted.extend(results)
                if not all(map(same, results, wanted)):
                    return math.inf
                # each case counts alike, however long it takes
                return math.prod(measure(case, device, samples=SAMPLES).median_s for case in calls) ** (1 / len(calls))
            except refusals:
                return math.inf

    return time


def tune(site: Site, start: Row, device: torch.device) -> tuple[Row, float] | str:
    """The best tile and its share of the present one's time, or why the kernel cannot run here."""
    from triton.errors import TritonError  # it does not compile, or needs more than a multiprocessor has

    kernel, cases = registry.kernels[site.kernel], list(cases_of(site, device))
    for case in cases:
        if reasons := reasons_against(kernel, *case.described, current_platform()):
            return "; ".join(reasons)
    calls = [case.calls(site.kernel) for case in cases]
    return best(start, site.choices, timer(site.name, calls, device, (TritonError,)))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table that is written")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only tiles whose names begin so, such as dense")


def run(args: argparse.Namespace) -> int:
    check_place(args.out)
    names = [site.name for site in SITES]
    for wanted in args.only or ():
        if not any(name.startswith(wanted) for name in names):
            raise InputError(f"--only {wanted}: no tile's name begins so; there are {', '.join(names)}")
    here = this_gpu()
    if here is None:
        raise InputError("tune measures on an NVIDIA GPU; torch finds none here. Run it on the machine that serves.")
    load_kernels()
    device, before = torch.device("cuda"), table()
    rows = dict(before.rows)
    print(f"{here.name}: tiles of {before.gpu.name} are where it begins")
    with kernels_for(device):
        for site in SITES:
            if args.only and not site.name.startswith(tuple(args.only)):
                continue
            found = tune(site, rows[site.name], device)
            torch.cuda.empty_cache()
            if isinstance(found, str):
                print(f" {site.name:<28} not measured: {found}", flush=True)
                continue
            rows[site.name], share = found
            print(f" {site.name:<28} {share:>6.1%} of the time with {rows[site.name]}", flush=True)
            write_atomically(args.out, as_text(Table(here, rows)).encode())
    print(f"{args.out} is written where a tile was measured; {VARIABLE}={args.out} takes it")
    return 0
