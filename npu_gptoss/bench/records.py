"""What a measurement leaves behind: one JSON file with its records, and enough to read them without asking.

A file says what ran (engine, versions, machine, date), what each number means (`definitions`), at which ceilings the
floors are, and at which price of a GPU hour tokens were priced. Another engine's file of the same form, measured on the
same machine and checkpoint, is laid beside ours record by record (`beside`).
"""

from __future__ import annotations

import datetime
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench.provenance import environment, machine, versions
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.errors import InputError
from npu_gptoss.files import read_json, write_atomically

Record = Mapping[str, Any]

SCHEMA = 1
OURS = "npu_gptoss"


@dataclass(frozen=True)
class Kind:
    """Fields of the records of one kind.

    keys: what tells them apart. measured: the number that a peer's record adds. floor: its floor, and the factor that
    brings it to the unit of the measured number. others: what ours hold besides.
    """

    keys: tuple[str, ...]
    measured: str
    floor: tuple[str, float] | None
    others: tuple[str, ...]

    @property
    def peers(self) -> tuple[str, ...]:
        """What another engine's record needs."""
        return tuple(name for name in (*self.keys, self.measured) if name not in ABSENT)

    @property
    def ours(self) -> tuple[str, ...]:
        work = () if self.floor is None else (self.floor[0], "bytes", "flops", "TBps", "TFLOPs", "percent_of_floor")
        return (*self.keys, self.measured, *work, *self.others)


KINDS = {
    "decode": Kind(
        ("model", "weights", "layout", "batch", "context"),
        "tpot_ms",
        ("floor_ms", 1.0),
        ("steps", "tokens_per_s"),
    ),
    "prefill": Kind(
        ("model", "weights", "layout", "prompt_tokens"),
        "prefill_s",
        ("floor_ms", 1e-3),
        ("tokens_per_s",),
    ),
    "kernel": Kind(("operation", "kernel", "case"), "us", ("floor_us", 1.0), ("method",)),
    "graphs": Kind(
        ("model", "weights", "graphs", "batch", "context"),
        "tpot_ms",
        None,
        ("eager_tpot_ms", "ratio", "tokens_compared", "tokens_identical"),
    ),
    "agreement": Kind(
        ("model", "weights"), "top1_agreement", None, ("requests", "tokens", "largest_gap", "decode_agreement")
    ),
}
# what a record that lacks the field means: another engine's, or one of an earlier date
ABSENT = {"layout": "tp1"}

_TEXTS = {"model", "weights", "layout", "operation", "kernel", "case", "method", "graphs"}
_COUNTS = {"batch", "context", "prompt_tokens", "steps", "requests", "tokens", "tokens_compared"}
# moving data takes no operations; two engines may share no token, or differ in none
_FROM_ZERO = {"flops", "TFLOPs", "tokens_identical", "top1_agreement", "largest_gap", "decode_agreement"}
_HEADER = ("schema", "what", "engine", "date", "machine", "versions", "definitions", "ceilings", "records")


def document(
    what: str,
    device: torch.device,
    records: Sequence[Record],
    *,
    definitions: Mapping[str, str],
    ceilings: Sequence[Ceilings],
    price_per_hour: float,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """A whole file's content. `settings` is what the command was told."""
    return {
        "schema": SCHEMA,
        "what": what,
        "engine": OURS,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(device),
        "versions": versions(),
        "environment": environment(),
        "settings": dict(settings),
        "definitions": dict(definitions),
        "ceilings": {
            c.name: {"TBps": round(c.bytes_per_s / 1e12, 4), "TFLOPs": round(c.flops_per_s / 1e12, 2)} for c in ceilings
        },
        "dollars_per_gpu_hour": price_per_hour,
        "records": [dict(record) for record in records],
    }


def problems(content: Any) -> list[str]:
    """What is wrong with the content of a file of ours, in words; nothing when it can be used."""
    if not isinstance(content, dict):
        return [f"expected a JSON object, got {content!r:.60}"]
    what, records = content.get("what"), content.get("records")
    if what not in KINDS:
        return [f"what must be one of {', '.join(KINDS)}, got {what!r}"]
    found = [f"{name} is missing" for name in _HEADER if name not in content]
    if content.get("schema") != SCHEMA:
        found.append(f"schema must be {SCHEMA}, got {content.get('schema')!r}")
    if not isinstance(records, list) or not records:
        return [*found, "records must be a list of at least one record"]
    seen: set[tuple[Any, ...]] = set()
    for number, record in enumerate(records):
        wrong = _misfits(record, KINDS[what].ours) or _wrong_share(KINDS[what], record)
        if not wrong and (key := key_of(what, record)) in seen:
            wrong = [f"repeats {key}"]
        elif not wrong:
            seen.add(key)
        found += [f"record {number}: {each}" for each in wrong]
    return found


def check_place(path: Path) -> None:
    """Raises InputError where `write` could not write. Asked before hours of measuring; makes nothing."""
    folder = next(place for place in path.absolute().parents if place.exists())
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"{path} cannot be written: name a file in a folder of yours")


def check_folder(folder: Path, *names: str) -> None:
    """Raises InputError where files of these names cannot be written, or an earlier run has written one of them.

    A run that measures less than the earlier one would leave some of the earlier one's numbers beside its own.
    """
    for name in names:
        check_place(folder / name)
        if (folder / name).exists():
            raise InputError(f"{folder} holds {name} of an earlier run: name another folder with --out, or remove it")


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a file whole or not at all. Content that `problems` objects to is a defect of the caller."""
    if wrong := problems(content):
        raise AssertionError("; ".join(wrong[:5]))
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read(path: Path, kinds: Iterable[str] = KINDS) -> dict[str, Any]:
    """A file of measurements, ours or a peer's, of one of these kinds, that says where it was measured."""
    content = read_peer(path, *kinds)
    if missing := [name for name in ("machine", "versions", "date") if name not in content]:
        raise InputError(f"{path}: {', '.join(missing)} missing: nobody can say what was measured, so measure it again")
    return content


def read_peer(path: Path, *kinds: str, needed: Sequence[str] | None = None) -> dict[str, Any]:
    """Another engine's file. Its records need the keys and the measured number of their kind, or `needed`."""
    content = read_json(path, InputError)
    what = content.get("what") if isinstance(content, dict) else content
    if what not in kinds:
        raise InputError(f"{path}: expected an object with records of {', '.join(kinds)}, got {what!r:.60}")
    if not isinstance(content.get("engine"), str) or not isinstance(content.get("records"), list):
        raise InputError(f"{path}: expected `engine` and a list of `records`, as our own files have")
    for number, record in enumerate(content["records"]):
        if wrong := _misfits(record, KINDS[what].peers if needed is None else needed):
            raise InputError(f"{path}: record {number}: {'; '.join(wrong)}")
    return content


def beside(records: Sequence[Record], peer: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Each record with `peer`: the other engine's name, its number and how many times as long it takes; or None."""
    measured = KINDS[what].measured
    theirs = {_case(what, record): record for record in peer["records"]}
    result = []
    for record in records:
        entry = None
        if (other := theirs.get(_case(what, record))) is not None:
            times = round(other[measured] / record[measured], 3)
            entry = {"engine": peer["engine"], measured: other[measured], "times_as_long": times}
        result.append({**record, "peer": entry})
    return result


def key_of(what: str, record: Record) -> tuple[Any, ...]:
    """What tells a record from the others of its kind, with the meaning of the fields that it lacks."""
    return tuple(record.get(name, ABSENT.get(name)) for name in KINDS[what].keys)


def _case(what: str, record: Record) -> tuple[Any, ...]:
    """What a peer's record has in common with ours: all of the key but a kernel's own name."""
    pairs = zip(KINDS[what].keys, key_of(what, record), strict=True)
    return tuple(value for name, value in pairs if name != "kernel")


def _misfits(record: Any, names: Iterable[str]) -> list[str]:
    """What is wrong with these fields of a record."""
    if not isinstance(record, dict):
        return [f"expected an object, got {record!r:.60}"]
    if lacking := [name for name in names if name not in record and name not in ABSENT]:
        return [f"lacks {', '.join(lacking)}"]
    values = {name: record.get(name, ABSENT.get(name)) for name in names}
    return [
        f"{name} must be {want}, got {value!r}" for name, value in values.items() if (want := _objection(name, value))
    ]


def _objection(name: str, value: Any) -> str | None:
    """What the field must be, where it is not."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if name in _TEXTS:
        return None if isinstance(value, str) and value else "a text"
    if name in _COUNTS:
        return None if number and isinstance(value, int) and value >= 1 else "a whole number from 1"
    if name in _FROM_ZERO:
        return None if number and value >= 0 else "a finite number from 0"
    if name.endswith("_ids"):
        return None if isinstance(value, list) else "a list of token ids"
    return None if number and value > 0 else "a finite number above 0"


def _wrong_share(kind: Kind, record: Record) -> list[str]:
    """A unit that is mixed up shows in the share of the floor."""
    if kind.floor is None:
        return []
    floor, factor = kind.floor
    percent = 100 * record[floor] * factor / record[kind.measured]
    if math.isclose(percent, record["percent_of_floor"], rel_tol=0.02, abs_tol=0.06):
        return []
    return [f"percent_of_floor is {record['percent_of_floor']}, but its numbers give {percent:.1f}"]
