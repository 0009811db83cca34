"""What the actions share: options, the engine, ceilings, the printed head, and the loop over the points measured."""

from __future__ import annotations

import argparse
import functools
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
from npu_gptoss.bench.measure import measure_ceilings
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config, model_name, random_tensors
from npu_gptoss.bench.roofline import NOMINAL, Ceilings, Work, beside_floor, dollars_per_million
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


class DoesNotFit(InputError):
    """A point that the engine's cache or batch is too small for; others may fit."""


def significant(value: Any, digits: int = 5) -> Any:
    """Rounds a float to digits that mean something, and leaves everything else."""
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


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


_OPTIONS: dict[str, dict[str, Any]] = {
    "--device": {"default": "auto", "metavar": "auto|cpu|cuda|npu"},
    "--dtype": {"default": "auto", "metavar": "auto|float32|bfloat16"},
    "--max-batch-tokens": {"default": 16384, "help": "of a step", **COUNT},
    "--block-size": {"default": 16, "help": "tokens in one block of the cache", **COUNT},
    "--num-blocks": {"help": "blocks of the cache (default: what memory allows)", **COUNT},
    "--weights": {"choices": assembly.WEIGHTS, "default": assembly.AUTO, "help": "the experts' format on the device"},
    "--fp8-projections": {"action": "store_true", "help": "attention's projections and lm_head in eight bits"},
    "--graphs": {"choices": (AUTO, *MODES), "default": AUTO, "help": "decode steps as graphs"},
    "--batch": {"default": [1, 8, 32, 128], "help": "requests of a decode step", **COUNTS},
    "--context": {"default": [1024], "help": "tokens of each prompt before decode", **COUNTS},
    "--steps": {"default": 128, "help": "steady decode steps measured", **COUNT},
    "--tokens": {"default": [8192], "help": "of a prefill", **COUNTS},
    "--repeats": {"default": 3, "help": "prompts measured", **COUNT},
    "--samples": {"default": 20, "help": "of each timing", **COUNT},
    "--profile": {"action": "store_true", "help": "show the device's kernels inside each point"},
    "--share-experts": {
        "choices": (TENSOR, EXPERT),
        "default": TENSOR,
        "help": "under torchrun: cut each expert, or deal them out whole",
    },
    "--gpu-price": {"type": float, "default": PRICE, "metavar": "USD", "help": "of one hour"},
    "--peer": {"type": Path, "metavar": "FILE", "help": "another engine's records, to be laid beside ours"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the records there"},
    "--out": {"type": Path, "metavar": "DIR", "required": True, "help": "the folder for decode.json and prefill.json"},
}
_OF_AN_ENGINE = (
    *("--device", "--dtype", "--max-batch-tokens", "--block-size", "--num-blocks"),
    *("--weights", "--fp8-projections", "--graphs", "--gpu-price"),
)


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """Options by name. defaults: where this action has another one, by the name in the namespace."""
    for name in names:
        how = dict(_OPTIONS[name])
        if (key := name.lstrip("-")) in defaults:
            how["default"] = defaults[key]
        if how.get("default") is not None:
            how["help"] = f"{how.get('help', '')} (default: %(default)s)".lstrip()
        parser.add_argument(name, **how)


def engine_arguments(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    """What every action with an engine takes, and these options."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="directory of a gpt-oss checkpoint")
    source.add_argument("--size", choices=SHAPES, help="random weights of a published shape, made on the device")
    add_options(parser, *_OF_AN_ENGINE, *names, **defaults)


@dataclass(frozen=True)
class Running:
    """An engine to measure. form: of its experts; nominal, own: ceilings of all the ranks' devices together."""

    args: argparse.Namespace
    engine: Engine
    device: torch.device
    form: str
    nominal: Ceilings
    own: Ceilings | None

    @property
    def layout(self) -> tuple[str, int]:
        """How the ranks share the model, as `Shard.layout`, and how many there are."""
        ranks = self.engine.model.ranks
        return ("tp1", 1) if ranks is None else (ranks.shard.layout, ranks.shard.size)

    def priced(self, work: Work, seconds: float, tokens: int) -> dict[str, Any]:
        """Fields of a record of `tokens` in `seconds`: what ran, beside its floors, and what it cost."""
        layout, gpus = self.layout
        return {
            "model": model_name(self.engine.config),
            "weights": self.form,
            "layout": layout,
            "gpus": gpus,
            "projections": "fp8" if self.args.fp8_projections else "bf16",
            **beside_floor(work, seconds, self.nominal, self.own, "ms"),
            "tokens_per_s": tokens / seconds,
            "dollars_per_million_tokens": dollars_per_million(tokens, seconds, self.args.gpu_price * gpus),
        }


@dataclass(frozen=True)
class Kind:
    """What an action measures.

    points: name of each point -> its arguments. measure, profile: called with what runs and a point's arguments, for a
    record and for the device's kernels inside.
    """

    what: str
    definitions: dict[str, str]
    head: str
    line: Callable[[dict[str, Any]], str]
    points: Callable[[argparse.Namespace], Mapping[str, tuple[int, ...]]]
    measure: Callable[..., dict[str, Any]]
    profile: Callable[..., list[profile.DeviceKernel]] | None = None


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
        yield Running(args, engine, device, expert_format(engine), nominal, own)
        engine.close()


def measure_kind(kind: Kind, running: Running, peer: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """A record of each point, printed as it is measured and written to --json; a point that does not fit is left out.

    The file is written after each point, because the next may take long, be ended, or fail.
    """
    args, rows = running.args, []
    write_here = functools.partial(write, args, kind.what, kind.definitions, running.device)
    ceilings = (running.nominal, running.own)
    if kind.head:
        print(kind.head)
    points = kind.points(args)
    for name, point in counted(points.items(), len(points), kind.what, "point"):
        try:
            row = kind.measure(running, *point)
        except DoesNotFit as error:
            print(f"{name}: not measured: {error}", file=sys.stderr)
            continue
        row = {key: significant(value) for key, value in row.items()}
        say(kind.line(row))
        if kind.profile is not None and args.profile:
            found = kind.profile(running.engine, *point)
            say("\n".join(profile.table(found)))
            row["inside"] = profile.as_records(found)
        rows.append(row)
        write_here(rows, ceilings, last=False)
    if peer is not None and rows:
        rows = records.beside(rows, peer, kind.what)
        print("\n".join([f"beside {peer['engine']}:", *map(kind.line, rows)]))
    if rows:
        write_here(rows, ceilings)
    return rows


def run(args: argparse.Namespace, kind: Kind, batches: Sequence[int]) -> int:
    """The whole of an action with one kind of records."""
    peer = None if getattr(args, "peer", None) is None else records.read_peer(args.peer, kind.what)
    with running_engine(args, batches) as running:
        say_what(kind.definitions, running.nominal, running.own, running.device, args.gpu_price)
        if not measure_kind(kind, running, peer):
            raise InputError(NOTHING_FITS)
    return 0


def batches_by_contexts(args: argparse.Namespace) -> dict[str, tuple[int, int]]:
    """The points of decode: (batch, context)."""
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


def write(
    args: argparse.Namespace,
    what: str,
    definitions: Mapping[str, str],
    device: torch.device,
    rows: Sequence[dict[str, Any]],
    ceilings: Sequence[Ceilings | None],
    *,
    last: bool = True,
) -> None:
    """The records into --json, by rank 0. last: whether these are all, so that it is said."""
    if args.json is None or not is_rank_0():
        return
    left_out = {"action", "json", "model", "out", "peer"}  # paths belong to one machine
    content = records.document(
        what,
        device,
        rows,
        definitions=definitions,
        ceilings=[each for each in ceilings if each is not None],
        price_per_hour=args.gpu_price,
        settings={name: value for name, value in vars(args).items() if name not in left_out},
    )
    records.write(args.json, content)
    if last:
        print(f"{args.json}: {len(rows)} records")
