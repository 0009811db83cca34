"""Write the tables of docs/performance.md's CUDA sections, and their picture, from the records in docs/benchmarks.

    python research/bench_table.py            # says whether the page is of these records
    python research/bench_table.py --write    # writes it

No number is typed: each is in a record that a command wrote (docs/benchmarks/README.md), and what this page says of it
follows from the record. Peers' numbers stand beside ours of the same point, from their own files. Goals are those that
were set before anything was measured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from npu_gptoss.bench.records import beside
from npu_gptoss.files import write_atomically
from npu_gptoss.tables import markdown
from research import inside_vllm
from research.bench_rows import EARLIER, FOLDER, Record, against, has_goals, layout_of, sources
from scripts.docs.page_tables import Tables

OURS = "npu_gptoss"

# Upper limits in milliseconds, of decode by (model, weights, batch, context); the factor is of the floor for `context`
# keys and uniform routing. Prefill's goal is the peer.
DECODE_LIMITS_MS = {
    ("20b", "mxfp4", 1, 1024): 1.5,
    ("20b", "mxfp4", 1, 8192): 1.6,
    ("20b", "bf16", 1, 1024): 2.2,
    ("120b", "mxfp4", 1, 1024): 2.2,
}
DECODE_FACTOR = 1.6
FACTOR_POINTS = {("20b", "mxfp4", batch, 1024) for batch in (8, 32, 128)} | {
    ("20b", "mxfp4", batch, 8192) for batch in (8, 32)
}
# Kernels alone, by (operation, case): the least share of the floor in percent, or the peer's time.
PEER = "peer"
KERNEL_GOALS: dict[tuple[str, str], float | str] = {
    ("moe.experts", "mxfp4 of 32 tokens=1"): 60.0,
    ("moe.experts", "mxfp4 of 32 tokens=8"): 80.0,
    ("moe.experts", "mxfp4 of 32 tokens=32"): 80.0,
    ("moe.experts", "mxfp4 of 32 tokens=128"): 80.0,
    ("moe.experts", "mxfp4 of 32 tokens=8192"): PEER,
    ("attention.paged", "prefill full 8192"): PEER,
    ("attention.paged", "prefill full 32768"): PEER,
    ("attention.paged", "decode full ctx=1024 B=1"): PEER,
    ("attention.paged", "decode full ctx=8192 B=32"): PEER,
}


def load(folder: Path = FOLDER) -> list[Record]:
    """Every record of every file, with its file's engine, kind, machine and date; ours with the peers' numbers."""
    contents = {file.name: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))}
    theirs = [content for content in contents.values() if content["engine"] != OURS]
    theirs.sort(key=lambda content: not content["engine"].endswith(EARLIER))
    found = []
    for name, content in contents.items():
        header = {name: content[name] for name in ("engine", "what", "machine", "versions", "date")}
        rows = content["records"]
        for peer in theirs:
            if content["engine"] == OURS and peer["what"] == content["what"]:
                both = zip(rows, beside(rows, peer, peer["what"]), strict=True)
                rows = [new if new["peer"] else old for old, new in both]
        found += [{**row, "_": {**header, "file": name}} for row in rows]
    return found


def of(records: Iterable[Record], what: str, ours: bool = True) -> list[Record]:
    return [r for r in records if r["_"]["what"] == what and (r["_"]["engine"] == OURS) == ours]


def experts_of(record: Record) -> str:
    """The experts' format, and whatever else is not as usual."""
    text = record["weights"]
    text += ", projections fp8" if record.get("projections") == "fp8" else ""
    return text + ("" if layout_of(record) == "tp1" else f", {layout_of(record)}")


def peers(record: Record, name: str, digits: int) -> str:
    """The peer's number; another day's says so."""
    peer = record.get("peer")
    if not peer:
        return "–"
    return f"{peer[name]:.{digits}f}" + (", earlier" if peer["engine"].endswith(EARLIER) else "")


def decode_goal(record: Record) -> float | None:
    """Milliseconds, or None where none was set."""
    point = (record["model"], record["weights"], record["batch"], record["context"])
    if record["projections"] != "bf16" or not has_goals(record):
        return None  # goals are for what the checkpoint holds
    if point in FACTOR_POINTS:
        return DECODE_FACTOR * record["floor_uniform_ms"]
    return DECODE_LIMITS_MS.get(point)


def decode_table(records: list[Record]) -> list[str]:
    head = (
        "model",
        "experts",
        "batch",
        "context",
        "TPOT ms",
        "floor ms",
        "of the floor",
        "TB/s",
        "peer ms",
        "goal ms",
        "",
    )
    rows = []
    for r in of(records, "decode"):
        goal = decode_goal(r)
        rows.append(
            (
                r["model"],
                experts_of(r),
                str(r["batch"]),
                str(r["context"]),
                f"**{r['tpot_ms']:.3f}**",
                f"{r['floor_ms']:.3f}",
                f"{r['percent_of_floor']:.0f} %",
                f"{r['TBps']:.2f}",
                peers(r, "tpot_ms", 3),
                f"≤ {goal:.2f}" if goal else "–",
                against(r["tpot_ms"], goal),
            )
        )
    return markdown(head, rows)


def prefill_table(records: list[Record]) -> list[str]:
    head = ("model", "experts", "tokens", "TTFT s", "floor s", "of the floor", "TFLOP/s", "peer s", "")
    rows = []
    for r in of(records, "prefill"):
        peer = r.get("peer")
        rows.append(
            (
                r["model"],
                experts_of(r),
                f"{r['prompt_tokens']:,}".replace(",", " "),
                f"**{r['prefill_s']:.3f}**",
                f"{r['floor_ms'] / 1e3:.3f}",
                f"{r['percent_of_floor']:.0f} %",
                f"{r['TFLOPs']:.0f}",
                peers(r, "prefill_s", 3),
                against(r["prefill_s"], peer["prefill_s"] if peer and has_goals(r) else None),
            )
        )
    return markdown(head, rows)


def kernel_verdict(record: Record) -> tuple[str, str]:
    """The goal and whether it is met."""
    goal = KERNEL_GOALS.get((record["operation"], record["case"])) if has_goals(record) else None
    if isinstance(goal, float):
        return f"≥ {goal:.0f} %", against(1 / record["percent_of_floor"], 1 / goal)
    peer = record.get("peer")
    if goal is None or peer is None:
        return "–", "–"
    return "≤ peer", against(record["us"], peer["us"])


def kernel_table(records: list[Record]) -> list[str]:
    """What is selected, and whatever is faster than it."""
    head = ("operation", "case", "kernel", "µs", "floor µs", "of the floor", "TB/s", "TFLOP/s", "peer µs", "goal", "")
    rows = []
    found = of(records, "kernel")
    selected = {(r["operation"], r["case"]): r["us"] for r in found if r["selected"]}
    for r in found:
        if not r["selected"] and r["us"] >= selected.get((r["operation"], r["case"]), 0.0):
            continue
        rows.append(
            (
                r["operation"],
                r["case"],
                r["kernel"].removeprefix(r["operation"] + ".") + ("" if r["selected"] else " (not selected)"),
                f"**{r['us']:.1f}**",
                f"{r['floor_us']:.1f}",
                f"{r['percent_of_floor']:.0f} %",
                f"{r['TBps']:.2f}",
                f"{r['TFLOPs']:.0f}",
                peers(r, "us", 1),
                *kernel_verdict(r),
            )
        )
    return markdown(head, rows)


def other_lines(records: list[Record]) -> list[str]:
    """Graphs against eager, tokens against the peer's."""
    lines = []
    for r in of(records, "graphs"):
        point = f"{r['model']} {r['weights']}, batch {r['batch']}, context {r['context']}"
        lines.append(
            f"* {r['graphs'].capitalize()} graphs against eager decode, {point}: {r['tpot_ms']:.2f} ms against "
            f"{r['eager_tpot_ms']:.2f} ms, **{r['ratio']:.1f} ×**; "
            f"{r['tokens_identical']} of {r['tokens_compared']} greedy tokens identical."
        )
    for r in of(records, "agreement"):
        lines.append(
            f"* Greedy tokens of {r['peer']['engine']} on the same checkpoint, {r['model']} {r['weights']}: "
            f"**{100 * r['top1_agreement']:.1f} %** of {r['tokens']} are also our largest logit; where not, ours is "
            f"larger by at most {r['largest_gap']:.3f} and on average {r['mean_gap']:.3f} deviations of all logits."
        )
        lines += control_table(r)
    return lines


def control_table(record: Record) -> list[str]:
    """What the same comparison says of our engine with a deliberate mistake."""
    if not record.get("controls"):
        return []
    head = ("our engine", "agrees", "gap on average, where not", "choices changed by the mistake")
    rows = [("as it is", f"**{100 * record['top1_agreement']:.1f} %**", f"{record['mean_gap']:.3f}", "")]
    for control in record["controls"]:
        agrees, changed = f"{100 * control['top1_agreement']:.1f} %", f"{100 * control['changed']:.1f} %"
        rows.append((control["mistake"], agrees, f"{control['mean_gap']:.3f}", changed))
    return ["", *markdown(head, rows)]


def render(records: list[Record]) -> str:
    """The whole section between the marks."""
    parts: list[str] = []
    for title, what, lines in (
        ("Decode, time per output token:", "decode", decode_table(records)),
        ("Prefill of one prompt, time to the first token:", "prefill", prefill_table(records)),
        ("Kernels alone, cold caches:", "kernel", kernel_table(records)),
    ):
        if of(records, what):
            parts += [title, "", *lines, ""]
    parts += [*other_lines(records), ""]
    parts += ["Records:", "", *sources(records)]
    return "\n".join(parts).strip() + "\n"


TABLES = Tables(
    script="research/bench_table.py",
    page="docs/performance.md",
    tables={
        "one GPU": lambda: render(load()).rstrip(),
        "inside vLLM": lambda: inside_vllm.render(inside_vllm.load()),
    },
)


def main(arguments: Sequence[str] | None = None) -> int:
    result = TABLES.main(__doc__, arguments)
    drawn = inside_vllm.picture(inside_vllm.load())
    if drawn and "--write" in (sys.argv[1:] if arguments is None else arguments):
        write_atomically(inside_vllm.PICTURE, drawn.encode())
    return result


if __name__ == "__main__":
    sys.exit(main())
