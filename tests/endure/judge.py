"""The results of endurance runs: a record of each (JSON), its verdicts, the table and the picture of the page.

A slope is that of a straight line through the medians of WINDOWS equal parts of the run after its first third, by least
squares, with a confidence of 95 %. A run under ENOUGH minutes, or too restless for the bound, is "not judged": no pass.
So is growth of threads that a pool may explain, which makes its threads one by one, until it is full.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npu_gptoss.files import write_atomically
from tests.endure.loop import LACKING, NEAR_TIE, UNSERVED, Findings

KEPT, BROKEN, NOT_JUDGED = "kept", "BROKEN", "not judged"
HEALTH_LIMIT = 5.0  # seconds
WINDOWS = 20
WARM_UP = 1 / 3
ENOUGH = 10.0  # minutes; a process takes memory for its first requests
# a minute: MiB, numbers, and of a time its share
BOUNDS = {"memory": 0.5, "descriptors": 0.5, "threads": 0.2, "first token": 0.02, "between tokens": 0.02}
SETTINGS = ("fcfs", "priority", "piecewise", "full")  # parts of a stack's name over which the tables add up
TOTALS = ("server", "scenarios", "runs", "longest, min", "requests", "honest, equal", "near-ties", "told of the end")
TOTALS += ("hostile, as due", "rude", "deaths", "slowest `/health`")
Points = list[tuple[float, float]]  # (minutes, value)


Slope = tuple[float, float]  # a minute, and half of the interval of confidence; of times as shares of the median


def verdict_of(name: str, slope: Slope | None) -> str:
    """None: the run was too short for one."""
    bound = BOUNDS[name.partition(", ")[0]]
    return NOT_JUDGED if slope is None or slope[1] > bound else "grows" if slope[0] > bound else "flat"


def pools() -> dict[str, int]:
    """How many threads the pools of a server on this machine may add to a series: the engine's compiles grammars
    (`StructuredOutputManager.executor` of vLLM)."""
    return {"threads, core": max(1, ((os.cpu_count() or 1) + 1) // 2)}


def student(freedom: int) -> float:
    """The 97.5 % quantile of Student's t, within 1 % from 3 degrees of freedom on (Abramowitz and Stegun, 26.7.5)."""
    z, n = statistics.NormalDist().inv_cdf(0.975), freedom
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / n**power for power, term in enumerate(terms))


def windows(points: Points, number: int) -> Points:
    """The medians of so many equal parts of the time; parts without a point are left out."""
    first, last = points[0][0], points[-1][0]
    width = (last - first) / number or 1.0
    parts: dict[int, Points] = {}
    for minute, value in points:
        parts.setdefault(min(number - 1, int((minute - first) / width)), []).append((minute, value))
    return [
        (statistics.mean(m for m, _ in part), statistics.median(v for _, v in part))
        for _, part in sorted(parts.items())
    ]


def slope_of(what: str, points: Points) -> Slope | None:
    kind = what.partition(", ")[0]
    points = [point for point in points if point[0] >= points[-1][0] * WARM_UP]
    parts = windows(points, WINDOWS) if points and points[-1][0] >= ENOUGH else []
    if len(parts) < 5:
        return None
    minutes, values = zip(*parts, strict=True)
    line = statistics.linear_regression(minutes, values)
    rest = [value - line.intercept - line.slope * minute for minute, value in parts]
    spread = math.sqrt(sum((minute - statistics.mean(minutes)) ** 2 for minute in minutes))
    half = student(len(parts) - 2) * math.sqrt(sum(one * one for one in rest) / (len(parts) - 2)) / spread
    unit = statistics.median(values) if kind in ("first token", "between tokens") else 1.0
    return line.slope / unit, half / unit


@dataclass
class Record:
    """One run, as written down."""

    stack: str
    scenario: str
    seed: int
    seconds: float
    requests: int
    exit_status: int | None  # of the server, if it ended during the run
    at_rest: dict[str, float]
    leftovers: list[str] | None  # processes that outlived the server
    health: dict[str, float]
    backwards: list[str]
    counts: list[tuple[str, str, str, int]]
    slopes: dict[str, Slope | None]
    series: dict[str, Points]
    load: float = 0.0  # of the machine at the end: its mean of 15 minutes
    words: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    in_flight: list[str] = field(default_factory=list)  # at a death
    log: list[str] = field(default_factory=list)  # the server's last lines if it died
    regrets: list[float] = field(default_factory=list)  # of the near-ties, in log-probability of fp32
    pools: dict[str, int] = field(default_factory=dict)  # see `pools`

    def number(self, group: str, outcome: str = "") -> int:
        return sum(n for g, _, o, n in self.counts if g == group and outcome in ("", o))

    def not_of(self, group: str, *outcomes: str) -> int:
        return self.number(group) - sum(self.number(group, outcome) for outcome in outcomes)

    def verdict(self, name: str) -> str:
        found, values = verdict_of(name, self.slopes[name]), [value for _, value in self.series.get(name, ())]
        fits = name in self.pools and max(values) - values[0] <= self.pools[name]
        return NOT_JUDGED if found == "grows" and fits else found

    def said(self, name: str) -> str:
        slope = self.slopes[name]
        return self.verdict(name) + (f": {slope[0]:+.3f} ± {slope[1]:.3f}" if slope else "")

    def of(self, verdict: str) -> list[str]:
        return [name for name in self.slopes if self.verdict(name) == verdict]


def counted(findings: Findings) -> list[tuple[str, str, str, int]]:
    return [(*key, number) for key, number in sorted(findings.counts.items())]


def health(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"asked": 0, "median": math.nan, "worst": math.inf}
    return {"asked": len(seconds), "median": statistics.median(seconds), "worst": max(seconds)}


def series(samples: list[tuple[float, dict[str, float]]], findings: Findings) -> dict[str, Points]:
    """Each series that may not grow, by minutes."""
    found: dict[str, Points] = {}
    for second, values in samples:
        for name, value in values.items():
            found.setdefault(name, []).append((second / 60, value))
    found["first token"] = [(second / 60, first) for second, first, _ in sorted(findings.streams)]
    found["between tokens"] = [(second / 60, between) for second, _, between in sorted(findings.streams)]
    return {name: points for name, points in found.items() if points}


def slopes(found: dict[str, Points]) -> dict[str, Slope | None]:
    return {name: slope_of(name, points) for name, points in found.items()}


def verdicts(record: Record, health_limit: float = HEALTH_LIMIT) -> list[tuple[str, str, str]]:
    """(promise, verdict, evidence) of each promise."""
    honest, told = record.number("honest"), record.number("honest", UNSERVED)
    wrong = record.not_of("honest", "equal", NEAR_TIE, UNSERVED) + record.number("alone")
    near = record.number("honest", NEAR_TIE)
    turned = f", {near} near-ties (fp32 prefers one by {max(record.regrets):.3f} at most)" if near else ""
    turned += f", {told} told that the server ends" if told else ""
    unanswered = record.not_of("hostile", "answered")
    grows, unsure = record.of("grows"), record.of(NOT_JUDGED)

    def kept(fine: bool) -> str:
        return KEPT if fine else BROKEN

    shown = (f"{name} {record.said(name)}" for name in (*grows, *unsure) or list(record.slopes)[:3])
    return [
        ("no death", kept(record.exit_status is None), f"{record.exit_status}"),
        (
            "honest answers as alone",
            BROKEN if wrong else KEPT if honest > told else NOT_JUDGED,
            f"{honest} asked, {wrong} wrong{turned}",
        ),
        ("hostile ones answered as due", kept(not unanswered), f"{record.number('hostile')} asked, {unanswered} not"),
        ("nobody stuck", kept(not record.not_of("rude", "done")), f"{record.number('rude')} rude clients"),
        ("changes done", kept(not record.not_of("operator", "done", LACKING)), "; ".join(record.changes[:6]) or "none"),
        (
            "at rest at the end",
            kept(bool(record.at_rest) and not any(record.at_rest.values())),
            ", ".join(f"{name} {value:g}" for name, value in record.at_rest.items()) or "not asked",
        ),
        ("no process left", kept(record.leftovers == []), f"{record.leftovers}"),
        ("counters never go back", kept(not record.backwards), "; ".join(record.backwards[:3]) or "none did"),
        (
            f"/health within {health_limit:g} s",
            kept(record.health["worst"] <= health_limit) if record.health["asked"] else NOT_JUDGED,
            f"{record.health['asked']:.0f} asked, worst {record.health['worst']:.2f} s",
        ),
        (
            "no slope",
            BROKEN if grows else KEPT if record.slopes and not unsure else NOT_JUDGED,
            "; ".join(shown) or "no series",
        ),
    ]


def status(record: Record, health_limit: float = HEALTH_LIMIT) -> int:
    """An exit status: 0 if all is kept, 1 if something is broken, 3 if something was not judged."""
    found = {verdict for _, verdict, _ in verdicts(record, health_limit)}
    return 1 if BROKEN in found else 3 if NOT_JUDGED in found else 0


def printed(record: Record, health_limit: float = HEALTH_LIMIT) -> str:
    """The run on a terminal: verdicts, then findings."""
    lines = [f"{record.scenario}, {record.stack}, {record.seed}: {record.requests} requests in {record.seconds:.0f} s"]
    lines += [f"  {verdict:10} {what}: {seen}" for what, verdict, seen in verdicts(record, health_limit)]
    fine = ("equal", NEAR_TIE, UNSERVED, LACKING, "answered", "done")
    lines += [f"    {n} × {group}, {kind}: {out}" for group, kind, out, n in record.counts if out not in fine]
    lines += [f"    {word}" for word in record.words]
    if record.exit_status is not None:
        lines += ["  in flight at the death: " + ", ".join(record.in_flight), "  the server's last lines:"]
        lines += [f"    {line}" for line in record.log]
    return "\n".join(lines)


def save(record: Record, folder: Path) -> Path:
    """A field a line; series as medians of 60 parts."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"endure-{record.stack}-{record.scenario}-{record.seed}.json"
    fields = asdict(record)
    fields["series"] = {
        name: [(float(f"{minute:.4g}"), float(f"{value:.5g}")) for minute, value in windows(points, 60)]
        for name, points in record.series.items()
    }
    lines = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items())
    write_atomically(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())
    return path


def load(folder: Path) -> list[Record]:
    return [Record(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("endure-*.json"))]


def server(record: Record) -> str:
    """The record's server; policies of scheduling and modes of graphs are left out."""
    return ", ".join(part for part in record.stack.split("-") if part not in SETTINGS)


def rows(titles: Sequence[str], cells: Sequence[Sequence[Any]]) -> str:
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def table(records: Sequence[Record]) -> str:
    """The page's two tables: all runs of each server, and those of each scenario where a server ran several."""
    runs_of: dict[str, list[Record]] = {}
    for record in records:
        runs_of.setdefault(server(record), []).append(record)
    several = [name for name in sorted(runs_of) if len({run.scenario for run in runs_of[name]}) > 1]
    scenarios = sorted({run.scenario for name in several for run in runs_of[name]})
    found = [
        [scenario, *(of_scenario([run for run in runs_of[name] if run.scenario == scenario]) for name in several)]
        for scenario in scenarios
    ]
    whole = rows(TOTALS, [[name, *totals(runs_of[name])] for name in sorted(runs_of)])
    return whole + ("\n\n" + rows(["scenario", *several], found) if found else "")


def totals(runs: Sequence[Record]) -> list[Any]:
    """The cells of TOTALS after the server's name."""

    def total(group: str, outcome: str = "") -> int:
        return sum(run.number(group, outcome) for run in runs)

    told, names = total("honest", UNSERVED), {run.scenario for run in runs}
    return [
        *(names if len(names) == 1 else (len(names),)),
        len(runs),
        f"{max(run.seconds for run in runs) / 60:.0f}",
        sum(run.requests for run in runs),
        f"{total('honest', 'equal')} of {total('honest') - told}",
        total("honest", NEAR_TIE),
        told,
        f"{total('hostile', 'answered')} of {total('hostile')}",
        total("rude"),
        sum(run.exit_status is not None for run in runs),
        f"{max(run.health['worst'] for run in runs):.2f} s",
    ]


def of_scenario(runs: Sequence[Record]) -> str:
    """Requests and minutes of all runs; the slope of the engine's memory in the longest, and what grew there."""
    if not runs:
        return "–"
    longest = max(runs, key=lambda run: run.seconds)
    slope = longest.slopes.get("memory, core")
    grows = sorted(longest.of("grows"))
    return (
        f"{sum(run.requests for run in runs)} in {sum(run.seconds for run in runs) / 60:.0f} min"
        + (f", {slope[0]:+.2f} ± {slope[1]:.2f}" if slope else "")
        + (f"; grows: {'; '.join(grows)}" if grows else "")
    )


def picture(record: Record) -> str:
    """Each series of a run as a line over its minutes (SVG)."""
    width, high = 250, 90
    shapes = [f'<text x="10" y="18">{record.stack}, {record.scenario}: {record.requests} requests</text>']
    for place, (name, points) in enumerate(sorted(record.series.items())):
        left, top = 10 + place % 3 * (width + 15), 30 + place // 3 * (high + 35)
        last, least, most = points[-1][0] or 1, min(v for _, v in points), max(v for _, v in points)
        line = " ".join(
            f"{left + minute / last * width:.1f},{top + high - (v - least) / ((most - least) or 1) * high:.1f}"
            for minute, v in points
        )
        verdict = record.said(name) if name in record.slopes else ""
        shapes.append(f'<polyline points="{line}" fill="none" stroke="#1f5fbf"/>')
        shapes.append(f'<text x="{left}" y="{top + high + 13}">{name}: {least:.4g} to {most:.4g}</text>')
        shapes.append(f'<text x="{left}" y="{top + high + 26}" fill="#777">{verdict}</text>')
    size = f"{3 * (width + 15) + 10} {60 + (len(record.series) + 2) // 3 * (high + 35)}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *shapes, "</svg>"]) + "\n"
