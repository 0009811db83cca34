"""Parts that the actions share: options, the engine, ceilings, the printed head, and the loop over the points."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench import provenance, records, roofline
from npu_gptoss.bench.measure import measure_ceilings, profile_table
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config, model_name, random_tensors
from npu_gptoss.bench.roofline import NOMINAL, Ceilings, Work, beside_floor, dollars_per_million
from npu_gptoss.engine import Engine, options
from npu_gptoss.engine.device import limit_threads, resolve_device
from npu_gptoss.engine.launched import device_and_ranks, is_rank_0, only_rank_0_speaks
from npu_gptoss.engine.options import NUMBER
from npu_gptoss.errors import InputError
from npu_gptoss.files import check_place
from npu_gptoss.kernels.dumping import tensors
from npu_gptoss.model import assembly
from npu_gptoss.model.config import CONFIG_NAME
from npu_gptoss.progress import counted, say

Record = dict[str, Any]

PRICE = 3.0  # dollars a GPU hour, the price that published comparisons of gpt-oss on this GPU were made at


class DoesNotFit(InputError):
    """A point that the engine's cache or batch is too small for; others may fit."""


def significant(value: Any) -> Any:
    """Rounds a float to digits that mean something, and leaves everything else."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


NUMBERS = {"nargs": "+", **NUMBER}
_OPTIONS: dict[str, dict[str, Any]] = {
    **options.OPTIONS,
    "--batch": {"default": [1, 8, 32, 128], "help": "requests of a decode step", **NUMBERS},
    "--context": {"default": [1024], "help": "tokens of each prompt before decode", **NUMBERS},
    "--steps": {"default": 128, "help": "steady decode steps measured", **NUMBER},
    "--tokens": {"default": [8192], "help": "of a prefill", **NUMBERS},
    "--repeats": {"default": 3, "help": "prompts measured", **NUMBER},
    "--samples": {"default": 20, "help": "of each timing", **NUMBER},
    "--profile": {"action": "store_true", "help": "show the device's kernels inside each point"},
    "--gpu-price": {"type": float, "default": PRICE, "metavar": "USD", "help": "of one hour"},
    "--json": {"type": Path, "metavar": "FILE", "help": "write the records there"},
}
_OF_AN_ENGINE = (*options.OPTIONS, "--gpu-price")


def add_options(parser: argparse.ArgumentParser, *names: str, **defaults: Any) -> None:
    options.add_options(parser, *names, options=_OPTIONS, **defaults)


@dataclass(frozen=True)
class Running:
    """An engine to measure. form: of its experts; ceilings: of all the ranks' devices together, as `ceilings_of`."""

    args: argparse.Namespace
    engine: Engine
    device: torch.device
    form: str
    ceilings: Sequence[Ceilings]

    def priced(self, work: Work, seconds: float, tokens: int) -> dict[str, Any]:
        """Fields of a record of `tokens` in `seconds`: model, layout, floors and cost."""
        ranks = self.engine.model.ranks
        layout, gpus = ("tp1", 1) if ranks is None else (ranks.shard.layout, ranks.shard.size)
        return {
            "model": model_name(self.engine.config),
            "weights": self.form,
            "layout": layout,
            "gpus": gpus,
            **beside_floor(work, seconds, self.ceilings, "ms"),
            "tokens_per_s": tokens / seconds,
            "dollars_per_million_tokens": dollars_per_million(tokens, seconds, self.args.gpu_price * gpus),
        }


@dataclass(frozen=True)
class Kind:
    """An action that measures an engine at several points, each with a printed line and a record.

    head, line: of the printed table. points: name of each point -> its arguments. measure: called with a `Running` and
    a point's arguments; it returns a record. profile: called with the engine and the same; it returns the device's
    kernels. options: beside those of an engine, as `add_options`.
    """

    what: str
    definitions: dict[str, str]
    head: str
    line: Callable[[Record], str]
    points: Callable[[argparse.Namespace], Mapping[str, tuple[int, ...]]]
    measure: Callable[..., Record]
    profile: Callable[..., list[Record]]
    options: tuple[str, ...]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--model", type=Path, metavar="DIR", help="directory of a gpt-oss checkpoint")
        source.add_argument("--size", choices=SHAPES, help="random weights of a published shape, made on the device")
        add_options(parser, *_OF_AN_ENGINE, *self.options)

    def run(self, args: argparse.Namespace) -> int:
        """Measures each point, prints it at once, and leaves out a point that does not fit."""
        with running_engine(args) as running:
            print_head(self.definitions, running.device, running.ceilings, args.gpu_price)
            print(self.head)
            kept = Kept(args, self.what, self.definitions, running.device, running.ceilings)
            points = self.points(args)
            for name, point in counted(points.items(), len(points), self.what, "point"):
                try:
                    row = self.measure(running, *point)
                except DoesNotFit as error:
                    print(f"{name}: not measured: {error}", file=sys.stderr)
                    continue
                row = {key: significant(value) for key, value in row.items()}
                say(self.line(row))
                if args.profile:
                    row["inside"] = self.profile(running.engine, *point)
                    say(profile_table(row["inside"]))
                kept.add(row)
            if not kept.end():
                raise InputError("none of these points fits this engine; standard error says why for each")
        return 0


@contextmanager
def running_engine(args: argparse.Namespace) -> Iterator[Running]:
    """An engine with graphs of exactly the sizes of --batch; under torchrun this rank's.

    Every rank must do the same inside. Only rank 0 prints.
    """
    check_output(args)
    batches = getattr(args, "batch", [1])
    given = ("dtype", "max_batch_tokens", "block_size", "num_blocks", "graphs", "weights")
    with (
        device_and_ranks(args.device, args.share_experts) as (name, ranks),
        only_rank_0_speaks(),
        tempfile.TemporaryDirectory() as folder,
    ):
        device = resolve_device(name)
        ceilings = ceilings_of(device, 1 if ranks is None else ranks.shard.size)
        model, tensors = args.model, None
        if args.size is not None:
            config, model = full_config(args.size, mxfp4=args.weights != assembly.FLOATS), folder
            # an engine takes its numbers from a file
            Path(folder, CONFIG_NAME).write_text(json.dumps(config.to_dict()))
            tensors = random_tensors(config, 0, device)
        engine = Engine(
            model,
            device=device,
            max_batch_size=max(batches),
            graph_sizes=sorted(set(batches)),
            ranks=ranks,
            tensors=tensors,
            progress=is_rank_0(),
            **{option: getattr(args, option) for option in given},
        )
        limit_threads(engine.config, device)
        yield Running(args, engine, device, expert_format(engine), ceilings)
        engine.close()


class Kept:
    """The records of one action. Rank 0 writes --json after each, because the next may take long, be ended, or fail."""

    def __init__(
        self,
        args: argparse.Namespace,
        what: str,
        definitions: Mapping[str, str],
        device: torch.device,
        ceilings: Sequence[Ceilings],
    ) -> None:
        left_out = ("action", "json", "model")  # paths belong to one machine
        settings = {name: value for name, value in vars(args).items() if name not in left_out}
        self._file: Path | None = args.json
        self._content = records.document(what, device, definitions, ceilings, args.gpu_price, settings)

    def add(self, row: Record) -> None:
        self._content["records"].append(row)
        if self._file is not None and is_rank_0():
            records.write(self._content, self._file)

    def end(self) -> int:
        """Names the file. Returns the number of records."""
        found = len(self._content["records"])
        if found and self._file is not None:
            print(f"{self._file}: {found} records")
        return found


def ceilings_of(device: torch.device, count: int = 1) -> list[Ceilings]:
    """The ceilings for floors: a known GPU's nominal ones, then the ones measured here; else only the latter.

    count: of equal devices that share the work; the ceilings are their sums.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    own = Ceilings("measured here", *measure_ceilings(device))
    return [each.of(count) for each in (NOMINAL.get(name), own) if each is not None]


def print_head(
    definitions: Mapping[str, str], device: torch.device, ceilings: Sequence[Ceilings], price: float
) -> None:
    """Prints the head of a table: machine, versions, ceilings, definitions and price."""
    found = provenance.machine(device)
    print(f"on {found['device']}, {', '.join(f'{k} {v}' for k, v in provenance.versions().items())}")
    for each in ceilings:
        print(f"ceilings, {each.name}: {each.bytes_per_s / 1e12:.3f} TB/s, {each.flops_per_s / 1e12:.1f} TFLOP/s")
    if len(ceilings) == 1:
        print("no nominal ceilings are known of it, so the floors are at those measured: compare within this run only")
    for name, meaning in definitions.items():
        print(f"  {name}: {meaning}")
    print(f"  one GPU hour: {price:.2f} dollars")


def check_output(args: argparse.Namespace) -> None:
    """Refuses a price and a place for --json that cannot be, before hours of measuring."""
    if not 0 <= args.gpu_price < math.inf:
        raise InputError(f"--gpu-price must be a number from 0, got {args.gpu_price:g}")
    if getattr(args, "json", None) is not None:
        check_place(args.json)


def expert_format(engine: Engine) -> str:
    """The format of the first layer's experts in memory, by their bytes, as `roofline` names it."""
    config, ranks = engine.config, engine.model.ranks
    matrix, _ = roofline.expert_parameters(config)
    held = [tensor.untyped_storage() for tensor in tensors(engine.model.layers[0].moe.experts.weights)]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())  # views of one count once
    each = total * (1 if ranks is None else ranks.shard.size) / (config.num_local_experts * matrix)
    return min(roofline.WEIGHT_BYTES, key=lambda name: abs(roofline.WEIGHT_BYTES[name] - each))
