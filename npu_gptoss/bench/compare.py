"""Two files of records, row by row: how many times as long the new one takes, and whether that is more than noise.

A row's band is what its own spread allows: the half-widths of both records, as shares of their numbers, added in
squares; never less than `SMALLEST`, since clocks and heat move every number a little. Rows without a spread get
`DEFAULT`, and say so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_gptoss.bench.records import KEYS, key_of
from npu_gptoss.errors import InputError

Record = Mapping[str, Any]

SMALLEST, DEFAULT = 0.01, 0.05
SLOWER, FASTER, WITHIN_NOISE = "slower", "faster", "within noise"


@dataclass(frozen=True)
class Measure:
    """One number of a record. spread: its half-width as a share of it, None where the record does not tell.

    larger_is_faster: of rates; times are the other way round.
    """

    name: str
    spread: Callable[[Record], float | None]
    larger_is_faster: bool = False


def _half(low: str, high: str, middle: str) -> Callable[[Record], float | None]:
    """Half of high - low."""

    def spread(record: Record) -> float | None:
        if record.get(low) is None or record.get(high) is None:
            return None
        return (record[high] - record[low]) / 2 / record[middle]

    return spread


def _repeats(record: Record) -> float | None:
    """Of a prefill; one repeat has no spread."""
    return _half("prefill_min_s", "prefill_max_s", "prefill_s")(record) if record.get("repeats", 1) > 1 else None


def _samples(record: Record) -> float | None:
    """Of a kernel, whose record holds (slowest - fastest) / median."""
    return record["spread"] / 2 if record.get("spread") is not None and record.get("samples", 1) > 1 else None


def _of_the_mean(stem: str) -> Callable[[Record], float | None]:
    """Twice the standard error of a mean over requests: they differ from each other by much more than runs do."""

    def spread(record: Record) -> float | None:
        if record.get(f"{stem}_std_ms") is None or not record.get("succeeded"):
            return None
        return 2 * record[f"{stem}_std_ms"] / math.sqrt(record["succeeded"]) / record[f"{stem}_mean_ms"]

    return spread


def _unknown(record: Record) -> None:
    return None


MEASURES: dict[str, tuple[Measure, ...]] = {
    "decode": (Measure("tpot_ms", _half("tpot_p10_ms", "tpot_p90_ms", "tpot_ms")),),
    "prefill": (Measure("prefill_s", _repeats),),
    "kernel": (Measure("us", _samples),),
    "graphs": (Measure("tpot_ms", _unknown), Measure("eager_tpot_ms", _unknown)),
    "serve": (
        *(Measure(f"{stem}_mean_ms", _of_the_mean(stem)) for stem in ("ttft", "tpot", "e2e")),
        Measure("output_tokens_per_s", _unknown, larger_is_faster=True),
    ),
}
SPREADS = {
    "decode": "half of what lies between a tenth and nine tenths of the steps",
    "prefill": "half of what lies between the fastest and the slowest repeat",
    "kernel": "half of what lies between the fastest and the slowest sample",
    "graphs": "not in these records",
    "serve": "two standard errors of the mean over requests; of the throughput not in these records",
}


@dataclass(frozen=True)
class Row:
    """One number of two records. ratio: time of the new one over the old one's, of a rate the old over the new."""

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
            f"the files have no record of {what} in common (told apart by {', '.join(KEYS[what])}): measure the same "
            "points in both"
        )
    only_old, only_new = (tuple(key for key in a if key not in b) for a, b in ((before, after), (after, before)))
    return Comparison(what, rows, only_old, only_new, tuple(_warnings(old, new)))


def _rows(what: str, key: tuple[Any, ...], old: Record, new: Record) -> Iterator[Row]:
    for measure in MEASURES[what]:
        values = old.get(measure.name), new.get(measure.name)
        if None in values or not min(values) > 0:
            continue  # a single token has no time per token
        spreads = measure.spread(old), measure.spread(new)
        assumed = None in spreads
        band = DEFAULT if assumed else max(SMALLEST, math.hypot(*spreads))
        ratio = values[0] / values[1] if measure.larger_is_faster else values[1] / values[0]
        yield Row(key, measure.name, *values, ratio, band, assumed)


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
        "times: new / old of a time, old / new of a rate, so that above 1 is slower. band: "
        f"{SPREADS[found.what]}, of both files added in squares, at least {SMALLEST:.0%}"
    )
    if any(row.assumed for row in found.rows):
        lines.append(f"* a record tells no spread: {DEFAULT:.0%} is assumed")
    counts = {verdict: sum(row.verdict == verdict for row in found.rows) for verdict in (SLOWER, FASTER, WITHIN_NOISE)}
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return lines


def _words(key: Sequence[Any]) -> str:
    return " ".join("-" if part is None else str(part) for part in key)
