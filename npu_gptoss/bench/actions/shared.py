"""What several actions share: options of an engine and of what is written, the engine, ceilings, the printed head."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import profile, provenance, records
from npu_gptoss.bench.decode import DoesNotFit
from npu_gptoss.bench.measure import measure_ceilings
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config, random_tensors
from npu_gptoss.bench.roofline import NOMINAL, Ceilings
from npu_gptoss.bench.routing import expert_format
from npu_gptoss.engine import Engine
from npu_gptoss.engine.decode import AUTO, MODES
from npu_gptoss.engine.device import resolve_device
from npu_gptoss.engine.launched import device_and_ranks, is_rank_0, only_rank_0_speaks
from npu_gptoss.errors import InputError
from npu_gptoss.model import assembly
from npu_gptoss.model.config import CONFIG_NAME
from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.sharding import EXPERT, TENSOR
from npu_gptoss.progress import counted, say

PRICE = 3.0  # dollars a GPU hour, the price that published comparisons of gpt-oss on this GPU were made at
NOTHING_FITS = "none of these points fits this engine; standard error says why for each"


def count(text: str) -> int:
    """Of what there has to be at least one; for argparse, which prints the sentence."""
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text!r}")
    return int(text)


class Once(argparse.Action):
    """Values of an option, each one once: a point that is named twice is one point, and its records would be equal."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, list(dict.fromkeys(values)))


COUNT = {"type": count, "metavar": "N"}
COUNTS = {"nargs": "+", "action": Once, **COUNT}


def engine_arguments(
    parser: argparse.ArgumentParser, *, peer: bool = True, share: bool = True, json: bool = True
) -> None:
    """peer, share, json: whether the option of that name (share: --share-experts) is offered."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="directory of a gpt-oss checkpoint")
    source.add_argument("--size", choices=SHAPES, help="random weights of a published shape, made on the device")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda|npu")
    parser.add_argument("--dtype", default="auto", metavar="auto|float32|bfloat16")
    parser.add_argument("--max-batch-tokens", default=16384, help="of a step (default: 16384)", **COUNT)
    parser.add_argument("--block-size", default=16, help="tokens in one block of the cache", **COUNT)
    parser.add_argument("--num-blocks", help="blocks of the cache (default: what memory allows)", **COUNT)
    parser.add_argument(
        "--weights", choices=assembly.WEIGHTS, default=assembly.AUTO, help="the experts' format on the device"
    )
    parser.add_argument(
        "--fp8-projections", action="store_true", help="attention's projections and lm_head in eight bits"
    )
    parser.add_argument("--graphs", choices=(AUTO, *MODES), default=AUTO, help="decode steps as graphs (default: auto)")
    if share:
        share_argument(parser)
    if peer:
        parser.add_argument("--peer", type=Path, metavar="FILE", help="another engine's records, to lie beside ours")
    output_arguments(parser, json=json)


def share_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share-experts",
        choices=(TENSOR, EXPERT),
        default=TENSOR,
        help="under torchrun: cut each expert, or deal them out whole (default: tensor)",
    )


def output_arguments(parser: argparse.ArgumentParser, *, json: bool = True) -> None:
    parser.add_argument("--gpu-price", type=float, default=PRICE, metavar="USD", help="of one hour (default: 3)")
    if json:
        parser.add_argument("--json", type=Path, metavar="FILE", help="write the records there")


@dataclass(frozen=True)
class Running:
    """An engine to measure. form: of its experts; nominal, own: ceilings of all the ranks' devices together."""

    engine: Engine
    device: torch.device
    form: str
    nominal: Ceilings
    own: Ceilings | None


@contextmanager
def running_engine(args: argparse.Namespace, batches: Sequence[int]) -> Iterator[Running]:
    """An engine with graphs of exactly these batch sizes; under torchrun this rank's of one that all of them share.

    Every rank must do the same inside; what they print is rank 0's only.
    """
    check_price(args.gpu_price)
    if args.json is not None:
        records.check_place(args.json)
    with device_and_ranks(args.device, args.share_experts) as (name, ranks), only_rank_0_speaks():
        device = resolve_device(name)
        nominal, own = ceilings_of(device, 1 if ranks is None else ranks.shard.size)
        engine = make_engine(args, device, batches, ranks)
        yield Running(engine, device, expert_format(engine), nominal, own)
        engine.close()


def with_engine(
    args: argparse.Namespace,
    what: str,
    definitions: dict[str, str],
    head: str,
    line: Callable[[dict[str, Any]], str],
    points: Callable[[argparse.Namespace, Running], list[dict[str, Any]]],
    batches: Sequence[int],
) -> int:
    """Makes an engine for these batch sizes, prints the table that `points` fills line by line, and writes it."""
    peer = None if args.peer is None else records.read_peer(args.peer, what)
    with running_engine(args, batches) as running:
        nominal, own, device = running.nominal, running.own, running.device
        say_what(definitions, nominal, own, device, args.gpu_price)
        print(head)
        rows = points(args, running)
        if not rows:
            raise InputError(NOTHING_FITS)
        if peer is not None:
            rows = records.beside(rows, peer, what)
            print(f"beside {peer['engine']}:")
            print("\n".join(line(row) for row in rows))
        write(args, what, device, rows, definitions, nominal, own)
    return 0


def each_that_fits(
    args: argparse.Namespace,
    what: str,
    running: Running,
    definitions: dict[str, str],
    points: Mapping[str, tuple[int, ...]],
    measure: Callable[..., dict[str, Any]],
) -> list[dict[str, Any]]:
    """The record that `measure` makes of each point; what does not fit the engine is said and left out.

    points: name -> arguments of `measure`, which prints its record. The file is written after each one, because the
    next may take long, be ended, or fail.
    """
    rows = []
    for name, arguments in counted(points.items(), len(points), what, "point"):
        try:
            rows.append(measure(*arguments))
        except DoesNotFit as error:
            print(f"{name}: not measured: {error}", file=sys.stderr)
            continue
        write(args, what, running.device, rows, definitions, running.nominal, running.own, last=False)
    return rows


def batches_by_contexts(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """The points of decode for `each_that_fits`: (batch, context)."""
    return {f"batch {batch}, context {context}": (batch, context) for context in args.context for batch in args.batch}


def make_engine(
    args: argparse.Namespace, device: torch.device, sizes: Sequence[int], ranks: Ranks | None = None
) -> Engine:
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
        "ranks": ranks,
        "progress": is_rank_0(),
    }
    if args.size is None:
        return Engine(args.model, **options)
    config = full_config(args.size, mxfp4=args.weights != assembly.FLOATS)
    with tempfile.TemporaryDirectory() as folder:  # an engine takes its numbers from a file
        (Path(folder) / CONFIG_NAME).write_text(json.dumps(config.to_dict()))
        return Engine(folder, tensors=random_tensors(config, 0, device), **options)


def ceilings_of(device: torch.device, count: int = 1) -> tuple[Ceilings, Ceilings | None]:
    """At which the floors are: nominal ones of a known GPU, with those measured here beside; else only the latter.

    count: of devices like this one that share the work; the ceilings are those of all.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    own = Ceilings("measured here", *measure_ceilings(device)).of(count)
    return (NOMINAL[name].of(count), own) if name in NOMINAL else (own, None)


def say_what(
    definitions: dict[str, str], nominal: Ceilings | None, own: Ceilings | None, device: torch.device, price: float
) -> None:
    found = provenance.machine(device)
    print(f"on {found['device']}, {', '.join(f'{k} {v}' for k, v in provenance.versions().items())}")
    for ceilings in filter(None, (nominal, own)):
        rates = f"{ceilings.bytes_per_s / 1e12:.3f} TB/s, {ceilings.flops_per_s / 1e12:.1f} TFLOP/s"
        print(f"ceilings, {ceilings.name}: {rates}")
    if nominal is not None and own is None:
        print("no nominal ceilings are known of it, so the floors are at those measured: compare within this run only")
    for name, meaning in definitions.items():
        print(f"  {name}: {meaning}")
    print(f"  one GPU hour: {price:.2f} dollars")


def check_price(price: float) -> None:
    if not 0 <= price < math.inf:
        raise InputError(f"--gpu-price must be a number from 0, got {price:g}")


def show_profile(found: list[profile.DeviceKernel]) -> list[dict[str, Any]]:
    say("\n".join(profile.table(found)))
    return profile.as_records(found)


def write(
    args: argparse.Namespace,
    what: str,
    device: torch.device,
    rows: Sequence[dict[str, Any]],
    definitions: dict[str, str],
    nominal: Ceilings | None,
    own: Ceilings | None,
    *,
    last: bool = True,
) -> None:
    """The records into --json, by rank 0. last: whether these are all, so that it is said."""
    if args.json is None or not is_rank_0():
        return
    left_out = {"action", "json", "model", "out", "peer"}  # paths belong to one machine
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
    if last:
        print(f"{args.json}: {len(rows)} records")
