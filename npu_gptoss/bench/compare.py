"""Two files of records, row by row: how many times as long the new one takes, and whether that is more than noise.

A row's band is what its own spread allows: the half-widths of both records, as shares of their numbers, added in
squares; never less than `SMALLEST`, since clocks and heat move every number a little. Rows without a spread get
`DEFAULT`, and say so.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_gptoss.bench import records
from npu_gptoss.bench.records import KINDS, key_of
from npu_gptoss.errors import InputError

Record = Mapping[str, Any]

SMALLEST, DEFAULT = 0.01, 0.05
SLOWER, FASTER, WITHIN_NOISE = "slower", "faster", "within noise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD.json", help="what --json wrote before")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="and after")
    parser.add_argument("--fail-on-slower", action="store_true", help="exit with 1 when a row is slower beyond noise")


def run(args: argparse.Namespace) -> int:
    found = compare(*(records.read(file) for file in (args.old, args.new)))
    print("\n".join(table(found)))
    return 1 if args.fail_on_slower and found.slower else 0


# times of a kind's records, and what their spread is
MEASURES = {
    "decode": (("tpot_ms",), "half of what lies between a tenth and nine tenths of the steps"),
    "prefill": (("prefill_s",), "half of what lies between the fastest and the slowest repeat"),
    "kernel": (("us",), "half of what lies between the fastest and the slowest sample"),
    "graphs": (("tpot_ms", "eager_tpot_ms"), "not in these records"),
}


RANGES = {
    "decode": ("tpot_p10_ms", "tpot_p90_ms", "steps"),
    "prefill": ("prefill_min_s", "prefill_max_s", "repeats"),
}


def half_width(what: str, record: Record) -> float | None:
    """Of a record's spread, as a share of its number; None where the record does not tell, or of one sample."""
    width, count = record.get("spread"), record.get("samples", 2)  # a kernel's: (slowest - fastest) / median
    if what in RANGES:
        low, high, samples = RANGES[what]
        width, count = None, record.get(samples, 2)
        if record.get(low) is not None and record.get(high) is not None:
            width = (record[high] - record[low]) / record[MEASURES[what][0][0]]
    return width / 2 if width is not None and count > 1 else None


@dataclass(frozen=True)
class Row:
    """One number of two records. ratio: the new one over the old one."""

    key: tuple[Any, ...]
    measure: str
    old: float
    new: float
    ratio: float
    band: float
    assumed: bool  # a record tells no spread, so the band is DEFAULT

    @property
    def verdict(self) -> str:
        if self.ratio > 1 + self.band:
            return SLOWER
        return FASTER if self.ratio < 1 / (1 + self.band) else WITHIN_NOISE


@dataclass(frozen=True)
class Comparison:
    """rows: in the order of the old file. only_old, only_new: keys of records without a counterpart."""

    what: str
    rows: tuple[Row, ...]
    only_old: tuple[tuple[Any, ...], ...]
    only_new: tuple[tuple[Any, ...], ...]
    warnings: tuple[str, ...]

    @property
    def slower(self) -> list[Row]:
        return [row for row in self.rows if row.verdict == SLOWER]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Files as `records.read` gives them. Raises InputError where nothing can be compared."""
    what = old["what"]
    if new["what"] != what:
        raise InputError(f"records of {what} and of {new['what']} measure different things and are not compared")
    if what not in MEASURES:
        raise InputError(f"records of {what} hold no times to compare; {', '.join(MEASURES)} do")
    before, after = ({key_of(what, record): record for record in content["records"]} for content in (old, new))
    rows = tuple(row for key, record in before.items() if key in after for row in _rows(what, key, record, after[key]))
    if not rows:
        raise InputError(
            f"the files have no record of {what} in common (told apart by {', '.join(KINDS[what].keys)}): "
            "measure the same points in both"
        )
    only_old, only_new = (tuple(key for key in a if key not in b) for a, b in ((before, after), (after, before)))
    return Comparison(what, rows, only_old, only_new, tuple(_warnings(old, new)))


def _rows(what: str, key: tuple[Any, ...], old: Record, new: Record) -> Iterator[Row]:
    widths = half_width(what, old), half_width(what, new)
    assumed = None in widths
    band = DEFAULT if assumed else max(SMALLEST, math.hypot(*widths))
    for name in MEASURES[what][0]:
        if old.get(name) and new.get(name):
            yield Row(key, name, old[name], new[name], new[name] / old[name], band, assumed)


def _warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    alone = []
    for title in ("engine", "machine", "versions"):
        before, after = (_flat(title, content.get(title)) for content in (old, new))
        for name in sorted(before.keys() | after.keys()):
            if name not in before or name not in after:
                alone.append(name)
            elif before[name] != after[name]:
                yield f"{name}: {before[name]}, then {after[name]}"
    if alone:
        yield f"only one of the files tells its {', '.join(alone)}"
    before, after = (content.get("environment") or {} for content in (old, new))
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name, 'unset')}, then {after.get(name, 'unset')}"
    before, after = (content.get("definitions") or {} for content in (old, new))
    changed = sorted(name for name in before.keys() & after.keys() if before[name] != after[name])
    if changed:
        yield f"the definitions of {', '.join(changed)} differ: read both before you believe a ratio"


def _flat(title: str, value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, Mapping) else {title: value}


def table(found: Comparison) -> list[str]:
    """What is printed: rows, what has no counterpart, and what the bands are."""
    width = max(len(_words(row.key)) for row in found.rows)
    lines = [f"warning: {warning}" for warning in found.warnings]
    lines.append(f"{'':<{width}} {'number':>20} {'old':>10} {'new':>10} {'times':>7} {'band':>8}  verdict")
    for row in found.rows:
        lines.append(
            f"{_words(row.key):<{width}} {row.measure:>20} {row.old:>10.4g} {row.new:>10.4g} {row.ratio:>7.3f} "
            f"{f'±{100 * row.band:.1f}%':>7}{'*' if row.assumed else ' '}  {row.verdict}"
        )
    for which, keys in (("old", found.only_old), ("new", found.only_new)):
        lines += [f"only in the {which} file: {_words(key)}" for key in keys]
    lines.append(
        f"times: new / old, so that above 1 is slower. band: {MEASURES[found.what][1]}, of both files added in "
        f"squares, at least {SMALLEST:.0%}"
    )
    if any(row.assumed for row in found.rows):
        lines.append(f"* a record tells no spread: {DEFAULT:.0%} is assumed")
    counts = {verdict: sum(row.verdict == verdict for row in found.rows) for verdict in (SLOWER, FASTER, WITHIN_NOISE)}
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return lines


def _words(key: Sequence[Any]) -> str:
    return " ".join("-" if part is None else str(part) for part in key)
