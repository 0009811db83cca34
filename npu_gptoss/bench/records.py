"""Records of measurements: one JSON file an action, with enough to read its rows alone.

A file holds the engine, versions, machine and date, the meaning of each number (`definitions`), the ceilings of the
floors, and the price of a GPU hour. Another engine's file of the same form, measured on the same machine and
checkpoint, is joined to ours row by row (`beside`).
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench.provenance import environment, machine, versions
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.errors import InputError
from npu_gptoss.files import read_json, write_atomically

Record = Mapping[str, Any]

SCHEMA, OURS = 1, "npu_gptoss"


@dataclass(frozen=True)
class Kind:
    """keys: the fields that tell rows apart. times: the measured fields, of which a peer's row needs the first.

    low, high, count: the fields of the range of the first time, and of how many samples made it. spread: in words.
    """

    keys: tuple[str, ...]
    times: tuple[str, ...]
    low: str = ""
    high: str = ""
    count: str = ""
    spread: str = "not in these records"


KINDS = {
    "decode": Kind(
        ("model", "weights", "layout", "batch", "context"),
        ("tpot_ms",),
        *("tpot_p10_ms", "tpot_p90_ms", "steps"),
        "half the distance from a tenth to nine tenths of the steps",
    ),
    "prefill": Kind(
        ("model", "weights", "layout", "prompt_tokens"),
        ("prefill_s",),
        *("prefill_min_s", "prefill_max_s", "repeats"),
        "half the distance from the fastest to the slowest repeat",
    ),
    "kernel": Kind(
        ("operation", "kernel", "case"),
        ("us",),
        count="samples",  # the row has its `spread` itself: (slowest - fastest) / median
        spread="half the distance from the fastest to the slowest sample",
    ),
    "graphs": Kind(("model", "weights", "graphs", "batch", "context"), ("tpot_ms", "eager_tpot_ms")),
}
ABSENT = {"layout": "tp1"}  # the meaning of a field that a peer's or an early row lacks


@dataclass(frozen=True)
class Document:
    """The content of a file."""

    what: str
    records: Sequence[Record]
    definitions: Mapping[str, str]
    ceilings: Mapping[str, Any]
    settings: Mapping[str, Any]
    dollars_per_gpu_hour: float | None
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    environment: Mapping[str, str] = field(default_factory=environment)
    date: str = field(default_factory=lambda: _now())
    not_measured: Mapping[str, str] = field(default_factory=dict)
    engine: str = OURS
    schema: int = SCHEMA

    @classmethod
    def measured(
        cls,
        what: str,
        device: torch.device,
        records: Sequence[Record],
        *,
        definitions: Mapping[str, str],
        ceilings: Sequence[Ceilings],
        price_per_hour: float,
        settings: Mapping[str, Any],
    ) -> Document:
        """Measured now, on this machine. settings: the options of the command."""
        rates = {
            c.name: {"TBps": round(c.bytes_per_s / 1e12, 4), "TFLOPs": round(c.flops_per_s / 1e12, 2)} for c in ceilings
        }
        return cls(what, records, definitions, rates, settings, price_per_hour, machine(device), versions())

    def write(self, path: Path) -> None:
        """Writes the file whole or not at all. A row that cannot be read again is a defect of the caller."""
        _check(self.what, self.records, AssertionError)
        if len({key_of(self.what, row) for row in self.records}) < len(self.records):
            raise AssertionError(f"two rows of {self.what} have the same {', '.join(KINDS[self.what].keys)}")
        write_atomically(path, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def read(path: Path, kinds: Iterable[str] = KINDS) -> dict[str, Any]:
    """A file of these kinds, ours or a peer's, that says where it was measured. Raises InputError."""
    content = read_peer(path, *kinds)
    if missing := [name for name in ("machine", "versions", "date") if name not in content]:
        raise InputError(f"{path}: {', '.join(missing)} missing, so its numbers cannot be placed: measure it again")
    return content


def read_peer(path: Path, *kinds: str) -> dict[str, Any]:
    """Another engine's file. Its rows need the keys and the time of their kind. Raises InputError."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file; `npu-gptoss bench … --json FILE` writes one")
    content = read_json(path, InputError)
    what = content.get("what") if isinstance(content, dict) else content
    if what not in kinds:
        raise InputError(f"{path}: expected an object with records of {', '.join(kinds)}, got {what!r:.60}")
    if not isinstance(content.get("engine"), str) or not isinstance(content.get("records"), list):
        raise InputError(f"{path}: expected `engine` and a list of `records`, as our own files have")
    _check(what, content["records"], InputError, f"{path}: ")
    return content


def _check(what: str, rows: Sequence[Any], error: type[Exception], where: str = "") -> None:
    """Raises for a row without the keys and the time of its kind: a text, a whole number from 1, a number above 0."""
    kind = KINDS[what]
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise error(f"{where}record {number}: expected an object, got {row!r:.60}")
        for name in (*kind.keys, kind.times[0]):
            value = row.get(name, ABSENT.get(name))
            wanted, right = "a text", isinstance(value, str) and value
            if name in kind.times:
                wanted = "a finite number above 0"
                right = type(value) in (int, float) and math.isfinite(value) and value > 0
            elif name in ("batch", "context", "prompt_tokens"):
                wanted, right = "a whole number from 1", type(value) is int and value >= 1
            if not right:
                raise error(f"{where}record {number}: {name} must be {wanted}, got {value!r}")


def check_place(path: Path) -> None:
    """Raises InputError if `path` cannot be written. Asked before hours of measuring; creates nothing."""
    folder = next(place for place in path.absolute().parents if place.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: name a file in a folder of yours")


def check_folder(folder: Path, *names: str) -> None:
    """Raises InputError if these files cannot be written, or exist: a smaller run would keep some old numbers."""
    for name in names:
        check_place(folder / name)
        if (folder / name).exists():
            raise InputError(f"{folder} holds {name} of an earlier run: name another folder with --out, or remove it")


def beside(records: Sequence[Record], peer: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Each row with `peer`: the other engine's name, its time and the ratio to ours; None without a counterpart."""
    time = KINDS[what].times[0]
    theirs = {_point(what, row): row for row in peer["records"]}
    result = []
    for row in records:
        other, entry = theirs.get(_point(what, row)), None
        if other is not None:
            times = round(other[time] / row[time], 3)
            entry = {"engine": peer["engine"], time: other[time], "times_as_long": times}
        result.append({**row, "peer": entry})
    return result


def key_of(what: str, row: Record) -> tuple[Any, ...]:
    return tuple(row.get(name, ABSENT.get(name)) for name in KINDS[what].keys)


def _point(what: str, row: Record) -> tuple[Any, ...]:
    """The key without the kernel's own name."""
    return tuple(row.get(name, ABSENT.get(name)) for name in KINDS[what].keys if name != "kernel")
