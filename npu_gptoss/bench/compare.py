"""Compares two files of records row by row: is the new one slower or faster, beyond noise?

The band of a row comes from its own spread: the half-widths of both records, as shares of their times, added in
squares; never less than SMALLEST, because clocks and heat move every number a little. Rows without a spread get
DEFAULT, and are marked.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_gptoss.bench import records
from npu_gptoss.bench.records import KINDS, Record, key_of
from npu_gptoss.errors import InputError

SMALLEST, DEFAULT = 0.01, 0.05
SLOWER, FASTER, WITHIN_NOISE = "slower", "faster", "within noise"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("old", type=Path, metavar="OLD.json", help="an earlier file of --json")
    parser.add_argument("new", type=Path, metavar="NEW.json", help="a later one")
    parser.add_argument("--fail-on-slower", action="store_true", help="exit with 1 when a row is slower beyond noise")


def run(args: argparse.Namespace) -> int:
    old, new = (records.read(file) for file in (args.old, args.new))
    rows = compare(old, new)
    print("\n".join(table(old, new, rows)))
    return 1 if args.fail_on_slower and any(row.verdict == SLOWER for row in rows) else 0


@dataclass(frozen=True)
class Row:
    """One time of two records. assumed: a record has no spread, so the band is DEFAULT."""

    key: tuple[Any, ...]
    measure: str
    old: float
    new: float
    band: float
    assumed: bool

    @property
    def ratio(self) -> float:
        return self.new / self.old

    @property
    def verdict(self) -> str:
        if self.ratio > 1 + self.band:
            return SLOWER
        return FASTER if self.ratio < 1 / (1 + self.band) else WITHIN_NOISE


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Row]:
    """The rows that both files have, in the order of the old one. Raises InputError where there is none."""
    what = old["what"]
    if new["what"] != what:
        raise InputError(f"records of {what} and of {new['what']} measure different things and are not compared")
    before, after = _by_key(old), _by_key(new)
    rows = [_row(what, key, before[key], after[key]) for key in before if key in after]
    if not rows:
        keys = ", ".join(KINDS[what].keys)
        raise InputError(f"the files have no record of {what} in common: measure the same {keys} in both")
    return rows


def _by_key(content: Mapping[str, Any]) -> dict[tuple[Any, ...], Record]:
    return {key_of(content["what"], row): row for row in content["records"]}


def _row(what: str, key: tuple[Any, ...], old: Record, new: Record) -> Row:
    widths, time = (half_width(what, old), half_width(what, new)), KINDS[what].time
    assumed = None in widths
    band = DEFAULT if assumed else max(SMALLEST, math.hypot(*widths))
    return Row(key, time, old[time], new[time], band, assumed)


def half_width(what: str, row: Record) -> float | None:
    """Half of the row's spread, as a share of its time; None without a spread, or of one sample."""
    kind = KINDS[what]
    low, high, width = row.get(kind.low), row.get(kind.high), row.get("spread")
    if low is not None and high is not None:
        width = (high - low) / row[kind.time]
    return width / 2 if width is not None and row.get(kind.count, 2) > 1 else None


def warnings(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Other differences between the files, which may explain a ratio."""
    before, after = (
        {"engine": c["engine"], **c["machine"], **c["versions"], **c.get("environment", {})} for c in (old, new)
    )
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield f"{name}: {before.get(name, 'not there')}, then {after.get(name, 'not there')}"
    before, after = (content.get("definitions") or {} for content in (old, new))
    if changed := sorted(name for name in before.keys() & after.keys() if before[name] != after[name]):
        yield f"the definitions of {', '.join(changed)} differ: read both before you believe a ratio"


def table(old: Mapping[str, Any], new: Mapping[str, Any], rows: list[Row]) -> list[str]:
    """The printed lines: warnings, rows, rows of one file only, and the meaning of the band."""
    width = max(len(_words(row.key)) for row in rows)
    lines = [f"warning: {warning}" for warning in warnings(old, new)]
    lines.append(f"{'':<{width}} {'number':>20} {'old':>10} {'new':>10} {'times':>7} {'band':>8}  verdict")
    for row in rows:
        lines.append(
            f"{_words(row.key):<{width}} {row.measure:>20} {row.old:>10.4g} {row.new:>10.4g} {row.ratio:>7.3f} "
            f"{f'±{100 * row.band:.1f}%':>7}{'*' if row.assumed else ' '}  {row.verdict}"
        )
    for which, mine, other in (("old", old, new), ("new", new, old)):
        lines += [f"only in the {which} file: {_words(key)}" for key in _by_key(mine) if key not in _by_key(other)]
    spread = KINDS[old["what"]].spread
    lines.append(f"times: new / old; above 1 is slower. band: {spread}, of both files, at least {SMALLEST:.0%}")
    if any(row.assumed for row in rows):
        lines.append(f"* a record has no spread: {DEFAULT:.0%} is assumed")
    counts = Counter(row.verdict for row in rows)
    return [*lines, ", ".join(f"{counts[verdict]} {verdict}" for verdict in (SLOWER, FASTER, WITHIN_NOISE))]


def _words(key: tuple[Any, ...]) -> str:
    return " ".join("-" if part is None else str(part) for part in key)
