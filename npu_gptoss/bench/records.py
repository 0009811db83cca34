"""Records of measurements: one JSON file an action, with enough to read its rows alone.

A file holds the engine, versions, machine and date, the meaning of each number (`definitions`), the ceilings of the
floors, and the price of a GPU hour. Other engines' files have the same form.
"""

from __future__ import annotations

import datetime
import json
import math
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench.provenance import environment, machine, versions
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.errors import InputError
from npu_gptoss.files import mode_of, read_json, write_atomically

Record = Mapping[str, Any]
Document = dict[str, Any]  # the content of a file

SCHEMA = 1


@dataclass(frozen=True)
class Kind:
    """keys: the fields that tell rows apart. time: the measured field.

    low, high, count: the fields of its range, and of how many samples made it. spread: in words.
    """

    keys: tuple[str, ...]
    time: str
    low: str = ""
    high: str = ""
    count: str = ""
    spread: str = ""


KINDS = {
    "decode": Kind(
        ("model", "weights", "layout", "batch", "context"),
        "tpot_ms",
        *("tpot_p10_ms", "tpot_p90_ms", "steps"),
        "half the distance from a tenth to nine tenths of the steps",
    ),
    "prefill": Kind(
        ("model", "weights", "layout", "prompt_tokens"),
        "prefill_s",
        *("prefill_min_s", "prefill_max_s", "repeats"),
        "half the distance from the fastest to the slowest repeat",
    ),
    "kernel": Kind(
        ("operation", "kernel", "case"),
        "us",
        count="samples",  # the row has its `spread` itself: (slowest - fastest) / median
        spread="half the distance from the fastest to the slowest sample",
    ),
}
ABSENT = {"layout": "tp1"}  # the meaning of a field that another engine's or an early row lacks
HEAD = {"engine": str, "machine": dict, "versions": dict, "date": str, "records": list}
WHOLE = ("batch", "context", "prompt_tokens")


def document(
    what: str,
    device: torch.device,
    definitions: Mapping[str, str],
    ceilings: Sequence[Ceilings],
    price_per_hour: float,
    settings: Mapping[str, Any],
) -> Document:
    """A file without rows yet, measured now on this machine. settings: the options of the command."""
    return {
        "what": what,
        "engine": "npu_gptoss",
        "schema": SCHEMA,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "environment": environment(),
        "settings": dict(settings),
        "dollars_per_gpu_hour": price_per_hour,
        "ceilings": {
            each.name: {"TBps": round(each.bytes_per_s / 1e12, 4), "TFLOPs": round(each.flops_per_s / 1e12, 2)}
            for each in ceilings
        },
        "definitions": dict(definitions),
        "records": [],
    }


def write(content: Document, path: Path) -> None:
    """Writes the file whole or not at all."""
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path) -> Document:
    """A file of KINDS, ours or another engine's, that says where it was measured. Raises InputError."""
    if not stat.S_ISREG(mode_of(path)):
        raise InputError(f"{path}: there is no such file; `npu-gptoss bench … --json FILE` writes one")
    content = read_json(path, InputError)
    what = content.get("what") if isinstance(content, dict) else content
    if what not in tuple(KINDS):  # what may be anything
        raise InputError(f"{path}: expected an object with records of {', '.join(KINDS)}, got {what!r:.60}")
    if missing := [name for name, form in HEAD.items() if not isinstance(content.get(name), form)]:
        said = f"{', '.join(missing)} missing or of another type"
        raise InputError(f"{path}: {said}, so its numbers cannot be placed: measure it again")
    for number, row in enumerate(content["records"]):
        if mistake := _mistake(KINDS[what], row):
            raise InputError(f"{path}: record {number}: {mistake}")
    return content


def _mistake(kind: Kind, row: Any) -> str:
    """The first of a row's keys, its time or its range that is missing or no text or number; "" for a right row."""
    if not isinstance(row, dict):
        return f"expected an object, got {row!r:.60}"
    spread = [name for name in (kind.low, kind.high, kind.count, "spread") if row.get(name) is not None]
    for name in (*kind.keys, kind.time, *spread):
        value = row.get(name, ABSENT.get(name))
        wanted, right = "a text", isinstance(value, str) and value
        if name == kind.time:
            wanted = "a finite number above 0"
            right = _is_number(value) and value > 0
        elif name in spread:
            wanted, right = "a finite number", _is_number(value)
        elif name in WHOLE:
            wanted, right = "a whole number from 1", type(value) is int and value >= 1
        if not right:
            return f"{name} must be {wanted}, got {value!r}"
    return ""


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def key_of(what: str, row: Record) -> tuple[Any, ...]:
    return tuple(row.get(name, ABSENT.get(name)) for name in KINDS[what].keys)
