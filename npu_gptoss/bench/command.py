"""Measure gpt-oss on this machine: decode and prefill of the offline engine, each kernel alone; beside the floor.

Without a checkpoint at hand, `bench checkpoint` writes one of full size with random weights first. On a machine
whose nominal ceilings are not known here, a CPU for one, the floors are at the ceilings that the run itself measures,
and only numbers of one run compare.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import (
    agreement,
    attention_cases,
    decode,
    dense_cases,
    kernels,
    moe_cases,
    prefill,
    profile,
    records,
)
from npu_gptoss.bench.measure import measure_ceilings
from npu_gptoss.bench.random_checkpoint import LAYOUTS, SHAPES, full_config, random_tensors, write_random_checkpoint
from npu_gptoss.bench.roofline import NOMINAL, WEIGHT_BYTES, Ceilings
from npu_gptoss.bench.routing import expert_format
from npu_gptoss.engine import Engine
from npu_gptoss.engine.decode import AUTO, MODES
from npu_gptoss.engine.device import kernels_for, resolve_device, resolve_dtype
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import load_kernels
from npu_gptoss.model import assembly
from npu_gptoss.model.config import CONFIG_NAME, GptOssConfig

PRICE = 3.0  # dollars a GPU hour, the price that published comparisons of gpt-oss on this GPU were made at
COUNTS = {"nargs": "+", "type": int, "metavar": "N"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True)

    step = commands.add_parser("decode", help="time per output token, batch by context")
    _engine_arguments(step)
    step.add_argument("--batch", default=[1, 8, 32, 128], help="requests (default: 1 8 32 128)", **COUNTS)
    step.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **COUNTS)
    step.add_argument("--steps", type=int, default=128, metavar="N", help="steady steps measured (default: 128)")

    step.add_argument("--profile", action="store_true", help="show the device's kernels inside a step of each point")

    prompt = commands.add_parser("prefill", help="time to the first token of one prompt")
    _engine_arguments(prompt)
    prompt.add_argument("--tokens", default=[8192], help="of the prompt (default: 8192)", **COUNTS)
    prompt.add_argument("--repeats", type=int, default=3, metavar="N", help="prompts measured (default: 3)")

    prompt.add_argument("--profile", action="store_true", help="show the device's kernels inside each prefill")

    kernel = commands.add_parser("kernel", help="each registered kernel of an operation alone")
    kernel.add_argument("operation", nargs="*", help="for example moe.experts; default: all")
    kernel.add_argument("--kernel", nargs="+", metavar="NAME", help="only these kernels or solutions")
    shape = kernel.add_mutually_exclusive_group()
    shape.add_argument("--size", choices=SHAPES, default="20b", help="published shapes (default: 20b)")
    shape.add_argument("--model", type=Path, metavar="DIR", help="the shapes of a checkpoint's config.json")
    kernel.add_argument("--batch", default=[1, 8, 32, 128], help="rows of a decode step", **COUNTS)
    kernel.add_argument("--context", default=[1024, 8192], help="of attention's decode (default: 1024 8192)", **COUNTS)
    kernel.add_argument("--tokens", default=[8192], help="of a prefill (default: 8192)", **COUNTS)
    kernel.add_argument(
        "--weights", nargs="+", choices=WEIGHT_BYTES, default=["mxfp4"], help="of the experts (default: mxfp4)"
    )
    kernel.add_argument("--block-size", type=int, default=16, metavar="N", help="of the cache (default: 16)")
    kernel.add_argument("--samples", type=int, default=20, metavar="N", help="of each timing (default: 20)")
    kernel.add_argument("--peer", type=Path, metavar="FILE", help="another engine's kernels, to be laid beside ours")
    kernel.add_argument("--device", default="auto", metavar="auto|cpu|cuda|npu")
    kernel.add_argument("--dtype", default="bfloat16", metavar="float32|bfloat16")
    _output_arguments(kernel)

    both = commands.add_parser("graphs", help="decode with graphs against without: times and tokens")
    _engine_arguments(both, peer=False)
    both.add_argument("--batch", default=[1], help="requests (default: 1)", **COUNTS)
    both.add_argument("--context", default=[1024], help="tokens of each prompt (default: 1024)", **COUNTS)
    both.add_argument("--steps", type=int, default=64, metavar="N", help="steady steps measured (default: 64)")

    same = commands.add_parser("agreement", help="greedy tokens against another engine's on the same checkpoint")
    _engine_arguments(same, peer=False)
    same.add_argument("--peer", type=Path, required=True, metavar="FILE", help="the other engine's prompts and tokens")

    weights = commands.add_parser("checkpoint", help="write a random checkpoint of full size, without a tokenizer")
    weights.add_argument("directory", type=Path, metavar="DIR", help="where to write; must hold no weights")
    weights.add_argument("--size", choices=SHAPES, default="20b")
    weights.add_argument("--weights", choices=LAYOUTS, default="mxfp4", help="layout of the experts (default: mxfp4)")
    weights.add_argument("--seed", type=int, default=0)
    weights.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where the numbers are drawn")


def _engine_arguments(parser: argparse.ArgumentParser, *, peer: bool = True) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="directory of a gpt-oss checkpoint")
    source.add_argument("--size", choices=SHAPES, help="random weights of a published shape, made on the device")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|npu")
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16")
    parser.add_argument("--max-batch-tokens", type=int, default=16384, metavar="N", help="of a step (default: 16384)")
    parser.add_argument("--block-size", type=int, default=16, metavar="N", help="tokens in one block of the cache")
    parser.add_argument("--num-blocks", type=int, metavar="N", help="blocks of the cache (default: what memory allows)")
    parser.add_argument(
        "--weights", choices=assembly.WEIGHTS, default=assembly.AUTO, help="the experts' format on the device"
    )
    parser.add_argument(
        "--fp8-projections", action="store_true", help="attention's projections and lm_head in eight bits"
    )
    parser.add_argument("--graphs", choices=(AUTO, *MODES), default=AUTO, help="decode steps as graphs (default: auto)")
    if peer:
        parser.add_argument("--peer", type=Path, metavar="FILE", help="another engine's records, to lie beside ours")
    _output_arguments(parser)


def _output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu-price", type=float, default=PRICE, metavar="USD", help="of one hour (default: 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")


def run(args: argparse.Namespace) -> int:
    actions = {
        "decode": _decode,
        "prefill": _prefill,
        "kernel": _kernel,
        "graphs": _graphs,
        "agreement": _agreement,
        "checkpoint": _checkpoint,
    }
    return actions[args.action](args)


def _checkpoint(args: argparse.Namespace) -> int:
    config = full_config(args.size, mxfp4=args.weights == "mxfp4")
    write_random_checkpoint(args.directory, config, seed=args.seed, device=resolve_device(args.device))
    size = sum(path.stat().st_size for path in args.directory.iterdir()) / 1e9
    print(f"{args.directory}: {args.size} {args.weights}, random, {size:.1f} GB")
    return 0


def _decode(args: argparse.Namespace) -> int:
    def measured(engine: Engine, form: str, nominal: Ceilings, own: Ceilings | None) -> list[dict[str, Any]]:
        rows = []
        for context in args.context:
            for batch in args.batch:
                try:
                    found = decode.run_decode(engine, batch, context, args.steps)
                except decode.DoesNotFit as error:
                    print(f"batch {batch}, context {context}: not measured: {error}", file=sys.stderr)
                    continue
                rows.append(
                    decode.decode_record(
                        engine,
                        found,
                        batch=batch,
                        context=context,
                        weights=form,
                        nominal=nominal,
                        measured=own,
                        price_per_hour=args.gpu_price,
                        fp8_projections=args.fp8_projections,
                    )
                )
                print(decode.decode_line(rows[-1]), flush=True)
                if args.profile:
                    rows[-1]["inside"] = _show(decode.profile_decode(engine, batch, context))
        return rows

    largest = max(args.batch)
    return _with_engine(args, "decode", decode.DEFINITIONS, decode.DECODE_HEAD, measured, largest)


def _prefill(args: argparse.Namespace) -> int:
    def measured(engine: Engine, form: str, nominal: Ceilings, own: Ceilings | None) -> list[dict[str, Any]]:
        rows = []
        for tokens in args.tokens:
            try:
                times = prefill.run_prefill(engine, tokens, args.repeats)
            except decode.DoesNotFit as error:
                print(f"{tokens} tokens: not measured: {error}", file=sys.stderr)
                continue
            rows.append(
                prefill.prefill_record(
                    engine,
                    times,
                    tokens=tokens,
                    weights=form,
                    nominal=nominal,
                    measured=own,
                    price_per_hour=args.gpu_price,
                )
            )
            print(prefill.prefill_line(rows[-1]), flush=True)
            if args.profile:
                rows[-1]["inside"] = _show(prefill.profile_prefill(engine, tokens))
        return rows

    return _with_engine(args, "prefill", prefill.DEFINITIONS, prefill.PREFILL_HEAD, measured, 1)


def _show(found: list[profile.DeviceKernel]) -> list[dict[str, Any]]:
    print("\n".join(profile.table(found)), flush=True)
    return profile.as_records(found)


def _with_engine(
    args: argparse.Namespace,
    what: str,
    definitions: dict[str, str],
    head: str,
    measured: Callable[[Engine, str, Ceilings, Ceilings | None], list[dict[str, Any]]],
    batch_size: int,
) -> int:
    peer = None if args.peer is None else records.read_peer(args.peer, what)
    _check_price(args.gpu_price)
    device = resolve_device(args.device)
    nominal, own = _ceilings(device)
    engine = _engine(args, device, args.batch if what == "decode" else [1])
    form = expert_format(engine)
    _say_what(definitions, nominal, own, device, args.gpu_price)
    print(head)
    rows = measured(engine, form, nominal, own)
    if not rows:
        raise InputError("none of these points fits this engine; standard error says why for each")
    if peer is not None:
        rows = records.beside(rows, peer, what)
        print(f"beside {peer['engine']}:")
        line = decode.decode_line if what == "decode" else prefill.prefill_line
        print("\n".join(line(row) for row in rows))
    _write(args, what, device, rows, definitions, nominal, own)
    return 0


def _engine(args: argparse.Namespace, device: torch.device, sizes: Sequence[int]) -> Engine:
    """With graphs of exactly the batch sizes that are measured."""
    options = {
        "device": device,
        "dtype": args.dtype,
        "max_batch_tokens": args.max_batch_tokens,
        "max_batch_size": max(sizes),
        "block_size": args.block_size,
        "num_blocks": args.num_blocks,
        "graphs": args.graphs,
        "graph_sizes": sorted(set(sizes)),
        "weights": args.weights,
        "fp8_projections": args.fp8_projections,
        "progress": True,
    }
    if args.size is None:
        return Engine(args.model, **options)
    config = full_config(args.size, mxfp4=args.weights != assembly.FLOATS)
    with tempfile.TemporaryDirectory() as folder:  # an engine takes its numbers from a file
        (Path(folder) / CONFIG_NAME).write_text(json.dumps(config.to_dict()))
        return Engine(folder, tensors=random_tensors(config, 0, device), **options)


def _graphs(args: argparse.Namespace) -> int:
    _check_price(args.gpu_price)
    device = resolve_device(args.device)
    engine = _engine(args, device, args.batch)
    _say_what(agreement.GRAPHS_DEFINITIONS, None, None, device, args.gpu_price)
    rows = []
    for context in args.context:
        for batch in args.batch:
            rows.append(agreement.compare_graphs(engine, batch, context, args.steps, expert_format(engine)))
            print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    _write(args, "graphs", device, rows, agreement.GRAPHS_DEFINITIONS, None, None)
    return 0


def _agreement(args: argparse.Namespace) -> int:
    peer = records.read_peer(args.peer, "greedy", ("prompt_token_ids", "token_ids"))
    _check_price(args.gpu_price)
    device = resolve_device(args.device)
    engine = _engine(args, device, [len(peer["records"])])
    _say_what(agreement.AGREEMENT_DEFINITIONS, None, None, device, args.gpu_price)
    record = agreement.compare(engine, peer["records"], expert_format(engine))
    record["peer"] = {"engine": peer["engine"]}
    print(", ".join(f"{name} {value}" for name, value in record.items()))
    _write(args, "agreement", device, [record], agreement.AGREEMENT_DEFINITIONS, None, None)
    return 0


def _kernel(args: argparse.Namespace) -> int:
    peer = None if args.peer is None else records.read_peer(args.peer, "kernel")
    load_kernels()
    _check_price(args.gpu_price)
    device = resolve_device(args.device)
    config = full_config(args.size) if args.model is None else GptOssConfig.from_directory(args.model)
    dtype = resolve_dtype(args.dtype, config)
    builders = _builders(args, config, device, dtype)
    unknown = sorted(set(args.operation) - builders.keys())
    if unknown:
        raise InputError(f"there are no cases of an operation {unknown[0]!r}, but of {', '.join(sorted(builders))}")
    nominal, own = _ceilings(device)
    _say_what(kernels.DEFINITIONS, nominal, own, device, args.gpu_price)
    print(kernels.KERNEL_HEAD)
    rows: list[dict[str, Any]] = []
    told: set[tuple[str, str]] = set()
    with kernels_for(device):
        for name in args.operation or sorted(builders):
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
    if peer is not None:
        rows = records.beside(rows, peer, "kernel")
        print(f"beside {peer['engine']}:")
        print("\n".join(kernels.kernel_line(row) for row in rows if row["peer"]))
    if not rows:
        raise InputError("no kernel could run any of these cases; standard error says why for each")
    _write(args, "kernel", device, rows, kernels.DEFINITIONS, nominal, own)
    return 0


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


def _ceilings(device: torch.device) -> tuple[Ceilings, Ceilings | None]:
    """At which the floors are: nominal ones of a known GPU, with those measured here beside; else only the latter."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    own = Ceilings("measured here", *measure_ceilings(device))
    return (NOMINAL[name], own) if name in NOMINAL else (own, None)


def _say_what(
    definitions: dict[str, str], nominal: Ceilings | None, own: Ceilings | None, device: torch.device, price: float
) -> None:
    found = records.machine(device)
    print(f"on {found['device']}, {', '.join(f'{k} {v}' for k, v in records.versions().items())}")
    for ceilings in filter(None, (nominal, own)):
        rates = f"{ceilings.bytes_per_s / 1e12:.3f} TB/s, {ceilings.flops_per_s / 1e12:.1f} TFLOP/s"
        print(f"ceilings, {ceilings.name}: {rates}")
    if nominal is not None and own is None:
        print("no nominal ceilings are known of it, so the floors are at those measured: compare within this run only")
    for name, meaning in definitions.items():
        print(f"  {name}: {meaning}")
    print(f"  one GPU hour: {price:.2f} dollars")


def _check_price(price: float) -> None:
    if price < 0:
        raise InputError(f"--gpu-price must be from 0, got {price}")


def _write(
    args: argparse.Namespace,
    what: str,
    device: torch.device,
    rows: Sequence[dict[str, Any]],
    definitions: dict[str, str],
    nominal: Ceilings | None,
    own: Ceilings | None,
) -> None:
    if args.json is None:
        return
    left_out = {"action", "json", "model", "peer"}  # paths belong to one machine
    settings = {name: value for name, value in vars(args).items() if name not in left_out}
    content = records.document(
        what,
        device,
        rows,
        definitions=definitions,
        ceilings=[c for c in (nominal, own) if c is not None],
        price_per_hour=args.gpu_price,
        settings=settings,
    )
    records.write(args.json, content)
    print(f"{args.json}: {len(rows)} records")
