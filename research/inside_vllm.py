"""The tables and the picture of our model inside vLLM 0.33 beside stock's; `bench_table.py` writes them.

They are of every record below docs/benchmarks/inside_vllm_0_33 and peer_0_33, in whatever files and folders, as
`bench_peer_vllm.py engine` and `bench_serving.py` wrote them: a file says whose it is. Of ours the newest record of a
point counts, of stock the fastest, over its experts backends. Goals are those of before the measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from math import log2
from pathlib import Path

from npu_gptoss.tables import markdown
from research.bench_rows import EARLIER, FOLDER, GOALS_ARE_FOR, Record, against, layout_of, sources

FOLDERS = ("inside_vllm_0_33", "peer_0_33")
PICTURE = FOLDER / FOLDERS[0] / "serving.svg"
OURS = " with npu_gptoss"  # ends the engine's name
DEFAULT = "default"
# of 20b in MXFP4
DECODE_MS = {1: 1.85, 8: 3.05, 32: 4.45, 128: 6.80}  # by batch, context 1024
PREFILL_S = {8192: 0.112, 32768: 0.580}
SPEEDUP = {1: 1.5, 16: 1.4, 64: 1.35, 256: 1.3}  # of output tokens, by streams
KEYS = {"decode": ("context", "batch"), "prefill": ("prompt_tokens",), "serving": ("streams", "clients")}
MEASURED = {"decode": "tpot_ms", "prefill": "prefill_s", "serving": "output_tokens_per_s"}

Point = tuple[str, str, str, tuple[int, ...]]  # model, weights, GPUs, and KEYS
Pair = tuple[Record | None, Record | None]  # ours, stock


def load(folder: Path = FOLDER) -> list[Record]:
    found = []
    for file in sorted(file for name in FOLDERS for file in (folder / name).rglob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        if content["what"] not in KEYS:
            continue
        header = {name: content[name] for name in ("engine", "what", "machine", "versions", "date", "settings")}
        header["note"] = content.get("note")
        found += [{**row, "_": {**header, "file": file.relative_to(folder).as_posix()}} for row in content["records"]]
    return found


def is_ours(record: Record) -> bool:
    return record["_"]["engine"].endswith(OURS)


def is_earlier(record: Record) -> bool:
    return record["_"]["engine"].endswith(EARLIER)


def pairs(records: Iterable[Record], what: str) -> dict[Point, Pair]:
    """By point, in order."""
    better = max if what == "serving" else min
    points: dict[Point, tuple[list[Record], list[Record]]] = {}
    for record in (record for record in records if record["_"]["what"] == what):
        key = tuple(record.get(name, 1) for name in KEYS[what])  # records of before --clients had one
        both = points.setdefault((record["model"], record["weights"], gpus_of(record), key), ([], []))
        both[0 if is_ours(record) else 1].append(record)
    found = {}
    for point in sorted(points, key=_rank):
        mine, stock = points[point]
        beside = [record for record in stock if not is_earlier(record)] or stock
        found[point] = (
            max(mine, key=lambda record: record["_"]["date"], default=None),
            better(beside, key=lambda record: record[MEASURED[what]], default=None),
        )
    return found


def _rank(point: Point) -> tuple[object, ...]:
    """20b before 120b, the GPU of the goals before others, one before two."""
    model, weights, gpus, _ = point
    return len(model), weights, gpus.split()[-1] not in GOALS_ARE_FOR, len(gpus), point


def backend(record: Record) -> str:
    return record.get("moe_backend") or record["_"]["settings"].get("moe_backend") or DEFAULT


def stocks(record: Record | None, name: str, digits: int) -> str:
    """Stock's number, with its backend and whether it is another day's."""
    if record is None:
        return "–"
    return f"{record[name]:.{digits}f} ({backend(record)}{', earlier' if is_earlier(record) else ''})"


def gpus_of(record: Record) -> str:
    """How many, and of which kind."""
    count, kind = layout_of(record).removeprefix("tp"), record["_"]["machine"]["device"].split()[1]
    return kind if count == "1" else f"{count} {kind}"


def is_20b(point: Point) -> bool:
    """On the GPU that goals are for."""
    return point[:3] == ("20b", "mxfp4", GOALS_ARE_FOR.split()[1])


def time_table(
    records: Iterable[Record], what: str, digits: int, goal_of: Callable[[Point], float | None]
) -> list[str]:
    unit = MEASURED[what].rpartition("_")[2]
    points = (name.removeprefix("prompt_") for name in KEYS[what])
    head = ("model", "experts", "GPUs", *points, f"ours {unit}", f"stock {unit}", "faster by", "goal", "")
    rows = []
    for point, (mine, stock) in pairs(records, what).items():
        value = mine[MEASURED[what]] if mine else None
        goal = goal_of(point) if mine and is_20b(point) else None
        rows.append(
            (
                *point[:3],
                *point[3],
                "–" if value is None else f"**{value:.{digits}f}**",
                stocks(stock, MEASURED[what], digits),
                f"{stock[MEASURED[what]] / value:.2f} ×" if value and stock else "–",
                f"≤ {goal:.{digits}f}" if goal else "–",
                against(value, goal) if value else "–",
            )
        )
    return markdown(head, rows) if rows else []


def decode_goal(point: Point) -> float | None:
    context, batch = point[3]
    return DECODE_MS.get(batch) if context == 1024 else None


def prefill_goal(point: Point) -> float | None:
    return PREFILL_S.get(point[3][0])


def both(mine: Record | None, stock: Record | None, name: str) -> str:
    """Ours and stock's in one cell, in milliseconds."""
    values = (record[name] if record else None for record in (mine, stock))
    return " / ".join("–" if value is None else f"{value:.{0 if value >= 100 else 1}f}" for value in values)


def serving_verdict(point: Point, mine: Record, stock: Record | None) -> tuple[str, str]:
    """The goal, and what of it is kept: speed, and no worse 99th percentiles."""
    streams, clients = point[3]
    goal = SPEEDUP.get(streams) if is_20b(point) and clients == 1 else None
    if goal is None or stock is None:
        return "–", "–"
    speedup = mine["output_tokens_per_s"] / stock["output_tokens_per_s"]
    missed = [] if speedup >= goal else [f"{speedup / goal:.2f} of the speed"]
    for name in ("itl", "ttft"):
        times = mine[f"{name}_p99_ms"] / stock[f"{name}_p99_ms"]
        missed += [f"p99 {name.upper()} {times:.2f} ×"] if times > 1 else []
    return f"≥ {goal} ×", "met" if not missed else f"missed: {', '.join(missed)}"


def serving_table(records: Iterable[Record]) -> list[str]:
    head = ("model", "experts", "GPUs", "streams", "clients", "ours tok/s", "stock tok/s", "faster by")
    head += ("ITL median", "ITL p99", "TTFT median", "TTFT p99", "goal", "")
    rows = []
    for point, (mine, stock) in pairs(records, "serving").items():
        speeds = [record["output_tokens_per_s"] if record else None for record in (mine, stock)]
        rows.append(
            (
                *point[:3],
                *point[3],
                f"**{speeds[0]:.0f}**" if mine else "–",
                stocks(stock, "output_tokens_per_s", 0),
                f"{speeds[0] / speeds[1]:.2f} ×" if mine and stock else "–",
                *(both(mine, stock, f"{time}_{kind}_ms") for time in ("itl", "ttft") for kind in ("median", "p99")),
                *(serving_verdict(point, mine, stock) if mine else ("–", "–")),
            )
        )
    return markdown(head, rows) if rows else []


def starts(records: Iterable[Record]) -> list[str]:
    """When each server was ready, and what its log said of its kernels."""
    headers = {record["_"]["file"]: record["_"] for record in records if record["_"]["what"] == "serving"}
    return [
        f"* {header['engine']} on {header['machine']['device']}, experts backend "
        f"{header['settings'].get('moe_backend') or DEFAULT}{flags_of(header['settings'])}: "
        f"{ready(header['settings']['start_s'])}{' '.join(header['settings']['kernels'])}".rstrip()
        for header in headers.values()
    ]


def ready(seconds: float | None) -> str:
    """None: it is not known."""
    return "" if seconds is None else f"ready after {seconds:.0f} s. "


def flags_of(settings: Record) -> str:
    """Those of the server that are not of every one."""
    _, _, more = " ".join(settings["flags"]).partition(" --no-enable-prefix-caching ")
    return f", `{more}`" if more else ""


def render(records: list[Record]) -> str:
    """The section, without the picture's file."""
    parts: list[str] = []
    for title, lines in (
        ("Decode, time per output token:", time_table(records, "decode", 3, decode_goal)),
        ("Prefill of one prompt, time to the first token:", time_table(records, "prefill", 3, prefill_goal)),
        ("`vllm bench serve`, milliseconds as ours / stock:", serving_table(records)),
        ("Servers:", starts(records)),
        ("Records:", sources(records)),
    ):
        parts += [title, "", *lines, ""] if lines else []
        if "bench serve" in title and picture(records):
            name = PICTURE.relative_to(FOLDER.parent).as_posix()
            parts += [f"![Output tokens a second by streams, ours and stock]({name})", ""]
    return "\n".join(parts).strip()


# -- the picture

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 70, 40, 110, 50
COLOURS = {"ours": "#1f5fbf", "stock": "#b3590a"}


def picture(records: Iterable[Record]) -> str | None:
    """Output tokens a second of 20b on one GPU against streams, both by powers of two, as SVG. None without records."""
    lines: dict[str, list[tuple[int, float]]] = {name: [] for name in COLOURS}
    for point, pair in pairs(records, "serving").items():
        for name, record in zip(COLOURS, pair, strict=True):
            if record and is_20b(point) and point[3][1] == 1:
                lines[name].append((point[3][0], record["output_tokens_per_s"]))
    drawn = [place for line in lines.values() for place in line]
    if not drawn:
        return None
    streams = sorted({place[0] for place in drawn})
    ticks = _powers(min(place[1] for place in drawn), max(place[1] for place in drawn))
    across = _scale(streams, LEFT, WIDTH - RIGHT)
    up = _scale(ticks, HEIGHT - BOTTOM, TOP)
    shapes = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<style>text { font-size: 13px }</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" font-weight="bold">gpt-oss-20b, vllm bench serve: output tokens/s by streams</text>',
    ]
    for tick in ticks:
        shapes.append(f'<path d="M{LEFT} {up(tick):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        shapes.append(f'<text x="{LEFT - 8}" y="{up(tick) + 4:.1f}" text-anchor="end">{tick:.0f}</text>')
    for count in streams:
        shapes.append(f'<text x="{across(count):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{count}</text>')
    shapes.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">streams</text>')
    for name, line in lines.items():
        if not line:
            continue
        places = [(across(count), up(speed)) for count, speed in line]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        shapes.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        shapes += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[name]}"/>' for x, y in places]
        x, y = places[-1]
        label = f"{name} {line[-1][1]:.0f}"
        shapes.append(f'<text x="{x + 10:.1f}" y="{y + 4:.1f}" fill="{COLOURS[name]}">{label}</text>')
    return "\n".join([*shapes, "</svg>"]) + "\n"


def _powers(least: float, most: float) -> list[int]:
    """Of two, from below the least to above the most."""
    first = max(0, int(least).bit_length() - 1)
    return [2**power for power in range(first, int(most).bit_length() + 1)]


def _scale(values: Sequence[int], begin: float, end: float) -> Callable[[float], float]:
    """By logarithm, from the first value to the last."""
    low, high = log2(values[0]), log2(values[-1])
    return lambda value: begin + (end - begin) * (log2(value) - low) / ((high - low) or 1)
