"""The sizes of kernels' tiles that differ from GPU to GPU: which table counts here, and its rows.

A table is a JSON file: the GPU on which it was measured, and by name the numbers of each tile, to which the kernels'
modules give a meaning. `assets/tiles-*.json` are the package's. NPU_GPTOSS_TILES names another, written by `npu-gptoss
tune`. A GPU without a table gets the nearest: by compute capability, then by the number of multiprocessors, then by the
bandwidth of the memory. Every table is right on every GPU, and best where it was measured.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from npu_gptoss import envs
from npu_gptoss.errors import InputError
from npu_gptoss.files import parse_json
from npu_gptoss.nominal import memory_bandwidth

VARIABLE = "NPU_GPTOSS_TILES"
FOLDER = Path(__file__).parents[1] / "assets"
FIRST = "tiles-nvidia-h200.json"  # whose names all others have, and what counts where no GPU is

logger = logging.getLogger("vllm.npu_gptoss")  # below "vllm": its handlers show it
Tile = TypeVar("Tile")
Row = Mapping[str, int]  # the numbers of a tile


@dataclass(frozen=True)
class Gpu:
    """name: as the driver gives it. bandwidth: nominal, GB/s; 0: not known."""

    name: str
    capability: tuple[int, int]
    processors: int
    bandwidth: int = 0


@dataclass(frozen=True)
class Table:
    gpu: Gpu
    rows: Mapping[str, Row]


def this_gpu() -> Gpu | None:
    """The GPU of this process; None where kernels run in Triton's interpreter, or nowhere."""
    torch = sys.modules.get("torch")
    if os.environ.get("TRITON_INTERPRET", "0") == "1" or torch is None or not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    bandwidth = memory_bandwidth(found.name) or 0
    return Gpu(found.name, (found.major, found.minor), found.multi_processor_count, bandwidth)


@functools.cache
def shipped() -> tuple[Table, ...]:
    """The package's, FIRST before the others."""
    paths = sorted(FOLDER.glob("tiles-*.json"), key=lambda path: (path.name != FIRST, path.name))
    first = _parsed(parse_json(paths[0].read_bytes()))
    return first, *(read(path, first) for path in paths[1:])


def _parsed(content: Any) -> Table:
    """Raises KeyError, TypeError or ValueError where it is no table."""
    gpu = content["gpu"]
    major, minor = gpu["capability"]
    rows = {name: dict(row) for name, row in content["tiles"].items()}
    return Table(Gpu(str(gpu["name"]), (major, minor), gpu["processors"], gpu["bandwidth"]), rows)


def read(path: Path, like: Table) -> Table:
    """A table with the names and numbers of `like`. Raises InputError."""
    remedy = f"Write it anew: npu-gptoss tune --out {path}"
    try:
        found = _parsed(parse_json(path.read_bytes()))
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        wrong = f"expected JSON with gpu and tiles, got {type(error).__name__}: {error}"
        raise InputError(f"{path} is no table of tiles: {wrong}. {remedy}", field="tiles") from None
    if found.rows.keys() != like.rows.keys():
        name = min(found.rows.keys() ^ like.rows.keys())
        what = "lacks" if name in like.rows else "has an unknown tile,"
        raise InputError(f"{path} {what} {name}. {remedy}", field=name)
    for name, row in found.rows.items():
        if row.keys() != like.rows[name].keys() or not all(
            type(number) is int and number > 0 for number in row.values()
        ):
            wanted = f"a positive whole number for each of {', '.join(like.rows[name])}"
            raise InputError(f"{path}: {name} needs {wanted}, got {row}. {remedy}", field=name)
    return found


def nearest(gpu: Gpu, tables: Sequence[Table]) -> Table:
    """The GPU's own, or the one of the GPU that is most like it; the first of several."""

    def distance(table: Table) -> tuple[int, ...]:
        other = table.gpu
        versions = (10 * each.capability[0] + each.capability[1] for each in (gpu, other))
        return (
            int(other.name != gpu.name),
            abs(next(versions) - next(versions)),
            abs(other.processors - gpu.processors),
            abs(other.bandwidth - gpu.bandwidth),
        )

    return min(tables, key=distance)


@functools.cache
def table() -> Table:
    """The table of this process; one warning when it was measured on another GPU. Raises InputError."""
    here, named = this_gpu(), envs.get(VARIABLE)
    if named:
        found = read(Path(named), shipped()[0])
        if here and found.gpu.name != here.name:
            remedy = f"Measure here: npu-gptoss tune --out FILE; or unset {VARIABLE}."
            other = f"{found.gpu.name}, and this is {here.name}"
            raise InputError(f"{VARIABLE}={named} was measured on {other}. {remedy}", field=VARIABLE)
        return found
    if here is None:
        return shipped()[0]
    found = nearest(here, shipped())
    if found.gpu.name != here.name:
        taken = f"npu-gptoss has no tiles measured on {here.name} and takes those of {found.gpu.name}"
        logger.warning("%s; `npu-gptoss tune --out FILE` measures, %s=FILE takes what it wrote.", taken, VARIABLE)
    return found


_tried: dict[str, Row] = {}


@functools.cache
def _of_table(name: str, form: type[Tile]) -> Tile:
    return form(**table().rows[name])


def tile(name: str, form: type[Tile]) -> Tile:
    """The tile of that name as the class of its kernel."""
    return form(**_tried[name]) if name in _tried else _of_table(name, form)


@contextmanager
def trial(name: str, tried: Row) -> Iterator[None]:
    """Inside, other numbers in the place of that name."""
    _tried[name] = tried
    try:
        yield
    finally:
        del _tried[name]


def as_text(found: Table) -> str:
    """The content of its file: a tile a line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(dict(row))}" for name, row in found.rows.items())
    return f'{{\n "gpu": {json.dumps(asdict(found.gpu))},\n "tiles": {{\n{lines}\n }}\n}}\n'
