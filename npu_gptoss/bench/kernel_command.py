"""`bench kernel`: each registered kernel of an operation alone."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import attention_cases, dense_cases, kernels, moe_cases, records, session
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config
from npu_gptoss.bench.roofline import WEIGHT_BYTES
from npu_gptoss.engine.device import kernels_for, resolve_device, resolve_dtype
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.model.config import GptOssConfig

SUMMARY = "each registered kernel of an operation alone"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("operation", nargs="*", action=session.Once, help="for example moe.experts; default: all")
    parser.add_argument("--kernel", nargs="+", metavar="NAME", help="only these kernels or solutions")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--size", choices=SHAPES, default="20b", help="published shapes (default: 20b)")
    shape.add_argument("--model", type=Path, metavar="DIR", help="the shapes of a checkpoint's config.json")
    names = (
        "--batch",
        "--context",
        "--tokens",
        "--block-size",
        "--samples",
        "--peer",
        "--device",
        "--dtype",
        "--gpu-price",
        "--json",
    )
    session.add_options(parser, *names, context=[1024, 8192], dtype="bfloat16")
    parser.add_argument(
        "--weights",
        nargs="+",
        choices=WEIGHT_BYTES,
        default=["mxfp4"],
        action=session.Once,
        help="of the experts (default: mxfp4)",
    )


def run(args: argparse.Namespace) -> int:
    peer = None if args.peer is None else records.read_peer(args.peer, "kernel")
    load_kernels()
    session.check_price(args.gpu_price)
    if args.json is not None:
        records.check_place(args.json)
    device = resolve_device(args.device)
    config = full_config(args.size) if args.model is None else GptOssConfig.from_directory(args.model)
    dtype = resolve_dtype(args.dtype, config)
    builders = _builders(args, config, device, dtype)
    unknown = sorted(set(args.operation) - builders.keys())
    if unknown:
        raise InputError(f"there are no cases of an operation {unknown[0]!r}, but of {', '.join(sorted(builders))}")
    operations = args.operation or sorted(builders)
    _check_kernels(args.kernel or (), operations)
    nominal, own = session.ceilings_of(device)
    session.say_what(kernels.DEFINITIONS, nominal, own, device, args.gpu_price)
    print(kernels.KERNEL_HEAD)
    rows: list[dict[str, Any]] = []
    told: set[tuple[str, str]] = set()

    def write(*, last: bool = True) -> None:
        ceilings = (nominal, own)
        session.write(args, "kernel", kernels.DEFINITIONS, device, rows, ceilings, last=last)

    with kernels_for(device):
        for name in operations:
            for found in kernels.run_kernels(
                builders[name](), device, wanted=args.kernel, nominal=nominal, measured=own, samples=args.samples
            ):
                if isinstance(found, kernels.Skipped):
                    if (found.kernel, found.reason) not in told:
                        print(f" {found.kernel}: not measured ({found.case}): {found.reason}", file=sys.stderr)
                    told.add((found.kernel, found.reason))
                else:
                    rows.append(found)
                    print(kernels.kernel_line(found), flush=True)
            if rows:
                write(last=False)
    if peer is not None:
        rows = records.beside(rows, peer, "kernel")
        print(f"beside {peer['engine']}:")
        print("\n".join(kernels.kernel_line(row) for row in rows if row["peer"]))
    if not rows:
        raise InputError("no kernel could run any of these cases; standard error says why for each")
    write()
    return 0


def _check_kernels(wanted: Sequence[str], operations: Sequence[str]) -> None:
    """Each has to name a kernel or a solution of one of the operations."""
    found = [kernel for name in operations for kernel in registry.kernels_of(registry.operations[name])]
    unknown = [name for name in wanted if name not in {kernel.name for kernel in found} | {k.solution for k in found}]
    if unknown:
        there = ", ".join(sorted({kernel.solution for kernel in found}))
        raise InputError(f"no kernel or solution of {', '.join(operations)} is called {unknown[0]!r}, but {there}")


def _builders(
    args: argparse.Namespace, config: GptOssConfig, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable[[], Iterable[kernels.Case]]]:
    """For each operation what makes its cases."""
    where = {"device": device, "dtype": dtype}
    rows = sorted({*args.batch, *args.tokens})
    attention = {"batches": args.batch, "contexts": args.context, "prompts": args.tokens}
    cache = {"block_size": args.block_size, **where}
    partial = functools.partial
    builders: dict[str, Callable[[], Iterable[kernels.Case]]] = {
        "attention.paged": partial(attention_cases.attention_cases, config, **attention, **cache),
        "attention.write_kv": partial(attention_cases.write_cases, config, batches=rows, **cache),
        "moe.experts": partial(moe_cases.experts_cases, config, tokens=rows, weights=args.weights, **where),
        "moe.route": partial(moe_cases.route_cases, config, batches=rows, **where),
    }
    for name in dense_cases.OPERATIONS:
        builders[name] = partial(dense_cases.dense_cases, name, config, rows=rows, **where)
    return builders
