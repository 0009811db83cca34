"""Count what three ways of computing attention and experts ask of an emulated 910B, and write the table of the docs.

    python scripts/trace_table.py                 # prints the table
    python scripts/trace_table.py --write         # and puts it into docs/performance.md

Needs the emulated environment (make setup-emulated) and nothing else: any Python 3.10 will do. Each way is served by
stock vllm-ascend 0.11.0 on the emulated machine (`traced_serving.py`), and the trace is cut by the marks in it.
Launches, copies, synchronisations and bytes follow from the operators that were called; how long silicon takes does
not.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from npu_gptoss.emulator.launch import EmulationError, Machine, environment, find_venv  # noqa: E402

PAGE = HERE.parent / "docs/performance.md"
BEGIN, END = "<!-- written by scripts/trace_table.py: begin -->", "<!-- end -->"

SHAPE = {
    "layers": 2,
    "hidden": 512,
    "intermediate": 512,
    "experts": 32,
    "heads": 8,
    "kv_heads": 2,
    "vocabulary": 128,
}
HEAD_DIM, TOP_K, BF16 = 64, 4, 2
CONTEXT, BATCHES, STEPS = 200, (1, 8, 10), 24

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
SCATTERS = ("aten::index_put_", "aten::_index_put_impl_")

OPERATIONS = ("ATTENTION_PAGED", "ATTENTION_WRITE_KV", "MOE_ROUTE", "MOE_EXPERTS")
STOCK_PLUGINS = "ascend,ascend_enhanced_model,ascend_kv_connector"


@dataclass(frozen=True)
class Way:
    """One column: `variables` select its kernels; without `plugin` vllm-ascend is alone."""

    title: str
    variables: Mapping[str, str] = field(default_factory=dict)
    plugin: bool = True


def _kernels(solution: str, operations: Iterable[str]) -> dict[str, str]:
    return {f"NPU_GPTOSS_KERNEL_{operation}": solution for operation in operations}


WAYS = {
    "small_ops": Way("small ops", _kernels("small_ops", OPERATIONS)),
    "article": Way("article", _kernels("article", (o for o in OPERATIONS if o != "ATTENTION_WRITE_KV"))),
    "ours": Way("ours"),
    "stock": Way("vllm-ascend alone", {"VLLM_PLUGINS": STOCK_PLUGINS}, plugin=False),
}


def size_of(operand: Sequence[Any]) -> int:
    dtype, shape = operand
    return DTYPE_BYTES[dtype] * math.prod(shape)


def moved(event: Mapping[str, Any]) -> int:
    """Bytes read and written. The trace takes the whole target of a scatter for written; only the rows named are."""
    if event["name"] in SCATTERS:
        _, *indices_and_values = map(size_of, event["inputs"])
        return sum(indices_and_values) + indices_and_values[-1]
    return event["read"] + event["written"]


@dataclass
class Counts:
    """What happened between a begin and its end. `needed`: the roofline's bytes; `host_ns`: CPU time of the host."""

    launches: int = 0
    replays: int = 0
    to_device: int = 0
    to_host: int = 0
    syncs: int = 0
    bytes: int = 0
    needed: int = 0
    host_ns: int = 0

    def add(self, event: Mapping[str, Any], previous: str) -> None:
        """`previous`: the kind of event before it. A blocking copy is one halt, with its synchronisation or without."""
        if event["event"] == "op" and event["phase"] not in ("capture", "update"):
            self.launches += 1
            self.bytes += moved(event)
        elif event["event"] == "copy":
            self.to_device += event["kind"] == "h2d"
            self.to_host += event["kind"] == "d2h"
            self.syncs += event["sync"] and previous != "sync"
        elif event["event"] == "sync":
            self.syncs += 1
        elif event["event"] == "graph" and event["what"] == "replay":
            self.replays += 1


def expert_bytes() -> int:
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"]
    return (3 * hidden * inner + 2 * inner + hidden) * BF16


def attention_weight_bytes() -> int:
    hidden, query, kv = SHAPE["hidden"], SHAPE["heads"] * HEAD_DIM, SHAPE["kv_heads"] * HEAD_DIM
    return (hidden * (query + 2 * kv) + query + 2 * kv + query * hidden + hidden) * BF16


def router_bytes() -> int:
    return (SHAPE["hidden"] + 1) * SHAPE["experts"] * BF16


def kv_bytes(lengths: Sequence[int], window: int | None) -> int:
    """Keys and values that one token of each request sees."""
    keys = sum(length if window is None else min(length, window) for length in lengths)
    return keys * 2 * SHAPE["kv_heads"] * HEAD_DIM * BF16


def is_decode(step: Mapping[str, Any], batch: int) -> bool:
    return step["requests"] == step["tokens"] == batch


def read_trace(lines: Iterable[str], batch: int) -> dict[str, list[Counts]]:
    """Every step, layer, attention and experts of the decode steps of `batch` requests, in order."""
    found: dict[str, list[Counts]] = defaultdict(list)
    open_regions: list[tuple[str, Counts, Mapping[str, Any]]] = []
    previous = ""
    for line in lines:
        event = json.loads(line)
        if event["event"] != "mark":
            for _, counts, _ in open_regions:
                counts.add(event, previous)
        elif event["name"] == "begin":
            open_regions.append((event["region"], Counts(), event))
        elif event["name"] == "end":
            region, counts, begin = open_regions.pop()
            counts.host_ns = event["host_ns"]
            needed = 0
            if region == "attention":
                needed = kv_bytes(begin["seq_lens"], begin["window"])
            elif region == "experts":
                needed = event["distinct"] * expert_bytes()
            elif region == "layer":
                needed = attention_weight_bytes() + router_bytes()
            counts.needed += needed
            for _, outer, _ in open_regions:
                outer.needed += needed
            step = open_regions[0][2] if open_regions else begin
            if step["region"] == "step" and is_decode(step, batch):
                found[region].append(counts)
        previous = event["event"]
    return found


def trace(
    way: Way, directory: Path, *, eager: bool = True, batches: Sequence[int] = BATCHES, steps: int = STEPS
) -> dict[int, dict[str, list[Counts]]]:
    """Serves `batches` that way and counts: batch -> region -> one entry for each time."""
    venv = find_venv()
    trace_file, job_file = directory / "trace.jsonl", directory / "job.json"
    trace_file.write_text("")
    options = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.5,
        "enforce_eager": eager,
    }
    job = {
        "checkpoint": str(directory / "checkpoint"),
        "shape": SHAPE,
        "options": options,
        "batches": list(batches),
        "context": CONTEXT,
        "steps": steps,
        "plugin": way.plugin,
    }
    job_file.write_text(json.dumps(job))
    done = subprocess.run(
        [str(venv / "bin/python"), str(HERE / "traced_serving.py"), str(job_file)],
        env={
            **environment(Machine(trace=trace_file), venv),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            **way.variables,
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise EmulationError(f"{way.title} was not served:\n{(done.stdout + done.stderr)[-4000:]}")
    with trace_file.open() as lines:
        everything = list(lines)
    return {batch: read_trace(everything, batch) for batch in batches}


def mean(counts: Sequence[Counts], name: str) -> float:
    return statistics.mean(getattr(entry, name) for entry in counts)


def host(counts: Sequence[Counts]) -> float:
    return statistics.median(entry.host_ns for entry in counts)


def over_roofline(counts: Sequence[Counts]) -> float:
    """Bytes moved over the bytes that the roofline counts."""
    return sum(entry.bytes for entry in counts) / sum(entry.needed for entry in counts)


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(measured: Mapping[str, Mapping[int, Mapping[str, Sequence[Counts]]]]) -> list[str]:
    """One line a batch, region and way. Host times relative to ours of the same batch and region."""
    columns = ("batch", "in a layer", "path", "device ops", "host→device", "device→host", "syncs", "MB moved")
    lines = [_row(*columns, "bytes / roofline", "host time"), "|" + "---|" * 10]
    for batch in measured["ours"]:
        for region in ("attention", "experts", "layer"):
            ours = host(measured["ours"][batch][region])
            for name, way in WAYS.items():
                counts = measured[name][batch].get(region)
                if not counts:
                    continue
                cells = [str(batch), region, f"**{way.title}**" if name == "ours" else way.title]
                cells += [number(mean(counts, what)) for what in ("launches", "to_device", "to_host", "syncs")]
                cells.append(f"{mean(counts, 'bytes') / 1e6:.2f}")
                cells.append(f"{over_roofline(counts):.3f}" if way.plugin else "–")
                cells.append(f"{host(counts) / ours:.2f}" if region != "layer" else "–")
                lines.append(_row(*cells))
    return lines


def step_table(measured: Mapping[str, Mapping[int, Mapping[str, Sequence[Counts]]]]) -> list[str]:
    """Whole decode steps, sampling and the runner's own work included."""
    columns = ("batch", "path", "device ops", "graph replays", "host→device", "device→host", "syncs")
    lines = [_row(*columns), "|" + "---|" * len(columns)]
    for batch in next(iter(measured.values())):
        for title, results in measured.items():
            counts = results[batch]["step"]
            names = ("launches", "replays", "to_device", "to_host", "syncs")
            lines.append(_row(str(batch), title, *(number(mean(counts, name)) for name in names)))
    return lines


def measure(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Every way in eager mode; and whole steps of what can be captured, piecewise too."""
    eager = {}
    for name, way in WAYS.items():
        print(f"serving: {way.title}", file=sys.stderr, flush=True)
        eager[name] = trace(way, directory)
    steps = {f"{way.title}, eager": eager[name] for name, way in WAYS.items()}
    for name in ("article", "ours"):
        print(f"serving: {WAYS[name].title}, piecewise graphs", file=sys.stderr, flush=True)
        steps[f"{WAYS[name].title}, piecewise"] = trace(WAYS[name], directory, eager=False)
    return eager, steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        with tempfile.TemporaryDirectory() as directory:
            eager, steps = measure(Path(directory))
    except EmulationError as error:
        print(error, file=sys.stderr)
        return 2
    text = "\n".join([*table(eager), "", "Whole decode steps:", "", *step_table(steps)])
    print(text)
    if args.write:
        page = PAGE.read_text()
        before, rest = page.split(BEGIN)
        after = rest.split(END, 1)[1]
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
