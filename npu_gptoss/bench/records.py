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
from pathlib import Path
from typing import Any

import torch

from npu_gptoss.bench.provenance import environment, machine, versions
from npu_gptoss.bench.roofline import Ceilings
from npu_gptoss.errors import InputError
from npu_gptoss.files import write_atomically

SCHEMA = 1
OURS = "npu_gptoss"

# the fields that tell records of one kind apart, and the measured one that a peer's record adds
KEYS = {
    "decode": ("model", "weights", "projections", "layout", "batch", "context"),
    "prefill": ("model", "weights", "projections", "layout", "prompt_tokens"),
    "kernel": ("operation", "kernel", "case"),
    "agreement": ("model", "weights"),
    "graphs": ("model", "weights", "graphs", "batch", "context"),
    "serve": ("model", "api", "prompt", "input_tokens", "output_tokens", "concurrency", "rate"),
}
# what a record that lacks the field means: another engine's, or one of an earlier date
ABSENT = {"projections": "bf16", "layout": "tp1"}
MEASURED = {
    "decode": "tpot_ms",
    "prefill": "prefill_s",
    "kernel": "us",
    "agreement": "top1_agreement",
    "graphs": "tpot_ms",
    "serve": "e2e_mean_ms",
}
_FLOOR = {"decode": ("floor_ms", 1.0), "prefill": ("floor_ms", 1e-3), "kernel": ("floor_us", 1.0)}

_TEXT, _COUNT, _NUMBER = "a text", "a whole number from 1", "a finite number above 0"
_AMOUNT = "a finite number from 0"  # moving data takes no operations
_FIELDS: dict[str, dict[str, str]] = {
    "decode": {
        "model": _TEXT,
        "weights": _TEXT,
        "projections": _TEXT,
        "batch": _COUNT,
        "context": _COUNT,
        "tpot_ms": _NUMBER,
        "steps": _COUNT,
        "floor_ms": _NUMBER,
        "bytes": _NUMBER,
        "flops": _NUMBER,
        "TBps": _NUMBER,
        "TFLOPs": _NUMBER,
        "percent_of_floor": _NUMBER,
        "tokens_per_s": _NUMBER,
    },
    "prefill": {
        "model": _TEXT,
        "weights": _TEXT,
        "prompt_tokens": _COUNT,
        "prefill_s": _NUMBER,
        "floor_ms": _NUMBER,
        "bytes": _NUMBER,
        "flops": _NUMBER,
        "TBps": _NUMBER,
        "TFLOPs": _NUMBER,
        "percent_of_floor": _NUMBER,
        "tokens_per_s": _NUMBER,
    },
    "kernel": {
        "operation": _TEXT,
        "kernel": _TEXT,
        "case": _TEXT,
        "us": _NUMBER,
        "floor_us": _NUMBER,
        "bytes": _NUMBER,
        "flops": _AMOUNT,
        "TBps": _NUMBER,
        "TFLOPs": _AMOUNT,
        "percent_of_floor": _NUMBER,
        "method": _TEXT,
    },
    "agreement": {
        "model": _TEXT,
        "weights": _TEXT,
        "requests": _COUNT,
        "tokens": _COUNT,
        "top1_agreement": _AMOUNT,
        "largest_gap": _AMOUNT,
        "decode_agreement": _AMOUNT,
    },
    "serve": {
        "model": _TEXT,
        "api": _TEXT,
        "prompt": _TEXT,
        "input_tokens": _COUNT,
        "output_tokens": _COUNT,
        "requests": _COUNT,
        "succeeded": _COUNT,
        "failed": _AMOUNT,
        "duration_s": _NUMBER,
        "output_tokens_per_s": _NUMBER,
        "requests_per_s": _NUMBER,
        "ttft_mean_ms": _NUMBER,
        "e2e_mean_ms": _NUMBER,
    },
    "graphs": {
        "model": _TEXT,
        "weights": _TEXT,
        "graphs": _TEXT,
        "batch": _COUNT,
        "context": _COUNT,
        "tpot_ms": _NUMBER,
        "eager_tpot_ms": _NUMBER,
        "ratio": _NUMBER,
        "tokens_compared": _COUNT,
        "tokens_identical": _AMOUNT,
    },
}
_HEADER = ("schema", "what", "engine", "date", "machine", "versions", "definitions", "ceilings", "records")


def document(
    what: str,
    device: torch.device,
    records: Sequence[Mapping[str, Any]],
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
    """What is wrong with a file's content, in words; nothing when it can be used."""
    if not isinstance(content, dict):
        return [f"expected a JSON object, got {content!r:.60}"]
    found = [f"{name} is missing" for name in _HEADER if name not in content]
    what = content.get("what")
    if what not in _FIELDS:
        return [*found, f"what must be one of {', '.join(_FIELDS)}, got {what!r}"]
    if content.get("schema") != SCHEMA:
        found.append(f"schema must be {SCHEMA}, got {content.get('schema')!r}")
    records = content.get("records")
    if not isinstance(records, list) or not records:
        return [*found, "records must be a list of at least one record"]
    seen: set[tuple[Any, ...]] = set()
    for number, record in enumerate(records):
        found += [f"record {number}: {problem}" for problem in _record_problems(what, record)]
        key = key_of(what, record)
        if key in seen:
            found.append(f"record {number} repeats {key}")
        seen.add(key)
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
    wrong = problems(content)
    if wrong:
        raise AssertionError("; ".join(wrong[:5]))
    write_atomically(path, (json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def read_peer(path: Path, what: str, needed: Sequence[str] | None = None) -> dict[str, Any]:
    """Another engine's file of the same kind. Its records need the keys and the measured number, nothing else.

    needed: the fields of each record, for files that hold no measurement.
    """
    needed = needed or [f for f in (*KEYS[what], MEASURED[what]) if f not in ABSENT]
    content = _object(path)
    if content.get("what") != what:
        got = content.get("what")
        raise InputError(f"{path}: expected records of {what}, got {got!r}; name the peer's file of the same kind")
    _check_records(path, content, needed)
    return content


def read(path: Path, kinds: Iterable[str] = KEYS) -> dict[str, Any]:
    """A file of measurements, ours or a peer's, of one of these kinds: its records have their keys and their number."""
    content = _object(path)
    what = content.get("what")
    if what not in kinds:
        raise InputError(f"{path}: expected records of {', '.join(kinds)}, got {what!r}")
    missing = [name for name in ("machine", "versions", "date") if name not in content]
    if missing:
        raise InputError(f"{path}: {', '.join(missing)} missing: nobody can say what was measured, so measure it again")
    _check_records(path, content, [f for f in (*KEYS[what], MEASURED[what]) if f not in ABSENT])
    return content


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a file of records ({error})") from None
    if not isinstance(content, dict):
        raise InputError(
            f"{path}: expected an object with records, as our own files have, got {type(content).__name__}"
        )
    return content


def _check_records(path: Path, content: Mapping[str, Any], needed: Sequence[str]) -> None:
    if not isinstance(content.get("engine"), str) or not isinstance(content.get("records"), list):
        raise InputError(f"{path}: expected `engine` and a list of `records`, as our own files have")
    for number, record in enumerate(content["records"]):
        missing = [f for f in needed if not isinstance(record, dict) or f not in record]
        if missing:
            raise InputError(f"{path}: record {number} lacks {', '.join(missing)}")
        wrong = _misfits(content["what"], record, needed)
        if wrong:
            raise InputError(f"{path}: record {number}: {'; '.join(wrong)}")


def beside(records: Sequence[Mapping[str, Any]], peer: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Each record with `peer`: the other engine's name, its number and how many times as long it takes; or None."""
    measured = MEASURED[what]
    theirs = {_case(what, record): record for record in peer["records"]}
    result = []
    for record in records:
        other = theirs.get(_case(what, record))
        entry = None
        if other is not None:
            times = round(other[measured] / record[measured], 3)
            entry = {"engine": peer["engine"], measured: other[measured], "times_as_long": times}
        result.append({**record, "peer": entry})
    return result


def _case(what: str, record: Any) -> tuple[Any, ...]:
    """What a peer's record has in common with ours: all of the key but a kernel's own name."""
    return tuple(record.get(name, ABSENT.get(name)) for name in KEYS[what] if name not in ("kernel", "projections"))


def key_of(what: str, record: Any) -> tuple[Any, ...]:
    """What tells a record from the others of its kind, with the meaning of the fields that it lacks."""
    if not isinstance(record, dict):
        return (repr(record),)
    return tuple(record.get(name, ABSENT.get(name)) for name in KEYS[what])


def _record_problems(what: str, record: Any) -> list[str]:
    if not isinstance(record, dict):
        return [f"expected an object, got {record!r:.60}"]
    found = _misfits(what, record, _FIELDS[what])
    if not found and what in _FLOOR:
        floor_name, factor = _FLOOR[what]
        percent = 100 * record[floor_name] * factor / record[MEASURED[what]]
        if not math.isclose(percent, record["percent_of_floor"], rel_tol=0.02, abs_tol=0.06):
            found.append(f"percent_of_floor is {record['percent_of_floor']}, but its numbers give {percent:.1f}")
    return found


def _misfits(what: str, record: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """What is wrong with these fields of a record, of those that its kind describes."""
    expected = {name: fits for name, fits in _FIELDS.get(what, {}).items() if name in names}
    values = {name: record.get(name) for name in expected}
    return [f"{name} must be {expected[name]}, got {v!r}" for name, v in values.items() if not _fits(v, expected[name])]


def _fits(value: Any, expected: str) -> bool:
    if expected == _TEXT:
        return isinstance(value, str) and bool(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    if expected == _COUNT:
        return isinstance(value, int) and value >= 1
    return math.isfinite(value) and (value > 0 or (value == 0 and expected == _AMOUNT))
