"""The results of a soak: a record of each run (JSON), its verdicts, and the table of the page.

A verdict is a limit that one run keeps or breaks. "Flat" compares the last third of the run, by requests, with the
second: the first third is warm-up.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from npu_gptoss.files import write_atomically
from tests.soak.run import NEAR_TIE, Findings
from tests.soak.server import Sample

HEALTH_LIMIT = 1.0  # seconds
# how much more the last third may have than the second, of either's median
GROWTH = {  # share of it, and MiB or number
    **{"rss": (0.03, 24.0), "gpu": (0.03, 24.0)},
    **{"descriptors": (0.0, 16.0), "threads": (0.0, 2.0)},
}
ENOUGH = 12  # looks at the processes below which nothing is said of their growth


@dataclass
class Record:
    """One run, as written down."""

    stack: str
    seed: int
    seconds: float
    requests: int
    exit_status: int | None  # of the server, if it ended during the run
    at_rest: dict[str, float]
    health: dict[str, float]
    slowest: dict[str, float]
    counts: list[tuple[str, str, str, int]]
    thirds: dict[str, dict[str, list[float]]]  # what -> role -> medians of the three thirds
    words: list[str]
    in_flight: list[str]
    begun: list[str]
    log: list[str]  # the server's last lines if it died
    regrets: list[float] = field(default_factory=list)  # of the near-ties, in log-probability of fp32

    def number(self, group: str, outcome: str = "") -> int:
        return sum(n for g, _, o, n in self.counts if g == group and outcome in ("", o))

    def not_of(self, group: str, *outcomes: str) -> int:
        return self.number(group) - sum(self.number(group, outcome) for outcome in outcomes)


def counted(findings: Findings) -> list[tuple[str, str, str, int]]:
    return [(*key, number) for key, number in sorted(findings.counts.items())]


def health(seconds: Sequence[float]) -> dict[str, float]:
    if not seconds:
        return {"asked": 0, "median": math.nan, "worst": math.inf, "slow": 0}
    slow = sum(one > HEALTH_LIMIT for one in seconds)
    return {"asked": len(seconds), "median": statistics.median(seconds), "worst": max(seconds), "slow": slow}


def thirds(samples: Sequence[Sample]) -> dict[str, dict[str, list[float]]]:
    """Medians of the samples in each third of the requests; empty when there were too few to say anything."""
    if len(samples) < ENOUGH:
        return {}
    last = samples[-1].done
    parts = [[s for s in samples if last * i / 3 <= s.done <= last * (i + 1) / 3] for i in range(3)]
    if not all(parts):
        return {}
    return {
        what: {
            role: [statistics.median(getattr(s, what)[role] for s in part) for part in parts]
            for role in getattr(samples[0], what)
        }
        for what in GROWTH
    }


def grown(record: Record) -> list[str]:
    """The series that grow, in words."""
    found = []
    for what, roles in record.thirds.items():
        share, some = GROWTH[what]
        for role, (_, second, last) in roles.items():
            if last > second * (1 + share) + some:
                found.append(f"{what} of {role} {second:.0f} → {last:.0f}")
    return found


def verdicts(record: Record, health_limit: float = HEALTH_LIMIT) -> list[tuple[str, bool, str]]:
    """(promise, kept, evidence) of each promise."""
    wrong = record.not_of("honest", "equal", NEAR_TIE) + record.number("alone")
    near = record.number("honest", NEAR_TIE)
    turned = f", {near} near-ties (fp32 prefers one by {max(record.regrets):.3f} at most)" if near else ""
    unanswered = record.not_of("hostile", "answered")
    growth = grown(record)
    at_rest = ", ".join(f"{name} {value:g}" for name, value in record.at_rest.items()) or "not asked"
    return [
        ("no death", record.exit_status is None, "alive" if record.exit_status is None else f"{record.exit_status}"),
        ("honest answers as alone", not wrong, f"{record.number('honest')} asked, {wrong} wrong{turned}"),
        ("hostile ones answered as due", not unanswered, f"{record.number('hostile')} asked, {unanswered} not"),
        ("nobody stuck", not record.not_of("rude", "done"), f"{record.number('rude')} rude clients"),
        ("at rest at the end", bool(record.at_rest) and not any(record.at_rest.values()), at_rest),
        (
            f"/health within {health_limit:g} s",
            record.health["worst"] <= health_limit,
            f"{record.health['asked']:.0f} asked, median {record.health['median'] * 1000:.0f} ms, "
            f"worst {record.health['worst']:.2f} s",
        ),
        ("memory, descriptors, threads flat", not growth, "; ".join(growth) or said_of_memory(record)),
    ]


def said_of_memory(record: Record) -> str:
    if not record.thirds:
        return "too short to say"
    looked = [(role, record.thirds["rss"][role]) for role in ("api", "core")]
    looked += [("GPU", one) for one in record.thirds.get("gpu", {}).values()]
    return "; ".join(f"{role} {' → '.join(f'{one:.0f}' for one in each)} MiB" for role, each in looked if any(each))


def printed(record: Record, health_limit: float = HEALTH_LIMIT) -> str:
    """The run on a terminal: verdicts, then findings."""
    lines = [f"soak {record.stack}, seed {record.seed}: {record.requests} requests in {record.seconds:.0f} s"]
    lines += [
        f"  {'kept  ' if kept else 'BROKEN'} {what}: {seen}" for what, kept, seen in verdicts(record, health_limit)
    ]
    odd = [f"    {n} × {group}, {kind}: {out}" for group, kind, out, n in record.counts if out not in FINE]
    lines += ["  not as it should be:", *odd] if odd else []
    lines += [f"    {word}" for word in record.words]
    if record.exit_status is not None:
        lines += [
            "  in flight at the death: " + ", ".join(record.in_flight),
            "  begun last: " + ", ".join(record.begun),
        ]
        lines += ["  the server's last lines:", *(f"    {line}" for line in record.log)]
    return "\n".join(lines)


FINE = ("equal", NEAR_TIE, "answered", "done")


def save(record: Record, folder: Path) -> Path:
    """A field a line: samples are many."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"soak-{record.stack}-{record.seed}.json"
    fields = (f"{json.dumps(name)}: {json.dumps(value)}" for name, value in asdict(record).items())
    write_atomically(path, ("{\n" + ",\n".join(fields) + "\n}\n").encode())
    return path


def load(folder: Path) -> list[Record]:
    return [Record(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(folder.glob("soak-*.json"))]


def table(records: Sequence[Record]) -> str:
    """The page's table: one row a stack; the runs of one stack (slices, seeds) are added up."""
    head = (
        "| server | runs | requests | honest, equal | hostile, as due | rude | deaths | at rest "
        "| slowest `/health` | memory |"
    )
    rows = [head, "|" + " --- |" * 10]
    for stack in sorted({record.stack for record in records}):
        runs = [record for record in records if record.stack == stack]

        def total(group: str, outcome: str = "", runs: list[Record] = runs) -> int:
            return sum(run.number(group, outcome) for run in runs)

        near = total("honest", NEAR_TIE)
        rest: Any = [max(values) for values in zip(*(run.at_rest.values() for run in runs), strict=False)]
        cells = [
            stack.replace("-", ", "),
            len(runs),
            sum(run.requests for run in runs),
            f"{total('honest', 'equal')} of {total('honest')}" + (f", {near} near-ties" if near else ""),
            f"{total('hostile', 'answered')} of {total('hostile')}",
            total("rude"),
            sum(run.exit_status is not None for run in runs),
            ", ".join(f"{value:g}" for value in rest),
            f"{max(run.health['worst'] for run in runs):.2f} s",
            "; ".join(sorted({growth for run in runs for growth in grown(run)})) or "flat",
        ]
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)
