"""Count what three ways of computing attention and experts ask of an emulated 910B, and write the table of the docs.

    python research/trace_table.py                 # prints the table
    python research/trace_table.py --write         # and puts it into docs/performance.md
    python research/trace_table.py --stacks        # decode steps of vllm-ascend 0.11.0 and 0.23.0, beside each other
    python research/trace_table.py --packed        # bytes with experts in BF16, and packed in MXFP4

Needs the emulated environment (make setup-emulated; --stacks that of 9.1, --packed that of the compiler) and nothing
else: any Python 3.10 will do, for --packed the environments' own. Each way is served by stock vllm-ascend on the
emulated machine (`traced_serving.py`), and the trace is cut by the marks in it.
Launches, copies, synchronisations and bytes follow from the operators that were called; how long silicon takes does
not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from ascend_emulator.errors import EmulatorError  # noqa: E402
from ascend_emulator.launch import EmulationError, Machine, environment, find_venv  # noqa: E402
from ascend_emulator.triton_launches import site_packages  # noqa: E402

from npu_gptoss.tables import markdown  # noqa: E402

PAGE = HERE.parent / "docs/performance.md"
TWO_DEVICES_TITLE = "Each of two devices (TP=2), eager:"
BEGIN, END = "<!-- written by research/trace_table.py: begin -->", "<!-- end -->"
COMPILER = HERE.parent / ".venv-ascend-compiler"

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

OPERATIONS = ("ATTENTION_PAGED", "ATTENTION_WRITE_KV", "MOE_ROUTE", "MOE_EXPERTS")


@dataclass(frozen=True)
class Way:
    """One column: `variables` select its kernels; without `plugin` vllm-ascend is alone. `mxfp4`: of the checkpoint, on
    a machine with Triton-Ascend."""

    title: str
    variables: Mapping[str, str] = field(default_factory=dict)
    plugin: bool = True
    mxfp4: bool = False


def _kernels(solution: str, operations: Iterable[str]) -> dict[str, str]:
    return {f"NPU_GPTOSS_KERNEL_{operation}": solution for operation in operations}


WAYS = {
    "small_ops": Way("small ops", _kernels("small_ops", OPERATIONS)),
    "article": Way("article", _kernels("article", (o for o in OPERATIONS if o != "ATTENTION_WRITE_KV"))),
    "ours": Way("ours"),
    "stock": Way("vllm-ascend alone", {"NPU_GPTOSS": "0"}, plugin=False),
}
FROM_MXFP4 = {
    how: Way(title, {"NPU_GPTOSS_EXPERT_WEIGHTS": how}, mxfp4=True)
    for how, title in (("expanded", "BF16"), ("packed", "MXFP4, packed"))
}


@dataclass
class Counts:
    """What happened between a begin and its end. `needed`: the roofline's bytes; `host_ns`: CPU time of the host."""

    launches: int = 0
    replays: int = 0
    updates: int = 0
    collectives: int = 0
    to_device: int = 0
    to_host: int = 0
    syncs: int = 0
    read: int = 0
    written: int = 0
    needed: int = 0
    host_ns: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def add(self, event: Mapping[str, Any], previous: str) -> None:
        """`previous`: the kind of event before it. A blocking copy is one halt, with its synchronisation or without."""
        if event["event"] == "op" and event["phase"] not in ("capture", "update"):
            self.launches += event["launches"]
            self.read += event["read"]
            self.written += event["written"]
        elif event["event"] == "op" and event["phase"] == "update":
            self.updates += 1
        elif event["event"] == "collective" and event["phase"] != "capture":
            self.collectives += 1
        elif event["event"] == "copy":
            self.to_device += event["kind"] == "h2d"
            self.to_host += event["kind"] == "d2h"
            self.syncs += event["sync"] and previous != "sync"
        elif event["event"] == "sync":
            self.syncs += 1
        elif event["event"] == "graph" and event["what"] == "replay":
            self.replays += 1


def expert_bytes(ranks: int) -> int:
    hidden, inner = SHAPE["hidden"], SHAPE["intermediate"] // ranks
    return (3 * hidden * inner + 2 * inner + hidden) * BF16


def attention_weight_bytes(ranks: int) -> int:
    hidden = SHAPE["hidden"]
    query, kv = SHAPE["heads"] * HEAD_DIM // ranks, SHAPE["kv_heads"] * HEAD_DIM // ranks
    return (hidden * (query + 2 * kv) + query + 2 * kv + query * hidden + hidden) * BF16


def router_bytes() -> int:
    return (SHAPE["hidden"] + 1) * SHAPE["experts"] * BF16


def kv_bytes(lengths: Sequence[int], window: int | None, ranks: int) -> int:
    """Keys and values that one token of each request sees."""
    keys = sum(length if window is None else min(length, window) for length in lengths)
    return keys * 2 * (SHAPE["kv_heads"] // ranks) * HEAD_DIM * BF16


def is_decode(step: Mapping[str, Any], batch: int) -> bool:
    return step["requests"] == step["tokens"] == batch


def needed_bytes(begin: Mapping[str, Any], end: Mapping[str, Any], ranks: int) -> int:
    """What the roofline counts for a region, without the regions in it."""
    if begin["region"] == "attention":
        return kv_bytes(begin["seq_lens"], begin["window"], ranks)
    if begin["region"] == "experts":
        return end["distinct"] * expert_bytes(ranks)
    return attention_weight_bytes(ranks) + router_bytes() if begin["region"] == "layer" else 0


def read_trace(lines: Iterable[str], batch: int, ranks: int = 1) -> dict[str, list[Counts]]:
    """Every step, layer, attention and experts of the decode steps of `batch` requests; of each rank its own share."""
    found: dict[str, list[Counts]] = defaultdict(list)
    of_process: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        event = json.loads(line)
        of_process[event.get("pid", 0)].append(event)
    for events in of_process.values():
        open_regions: list[tuple[Counts, Mapping[str, Any]]] = []
        for previous, event in pairwise([{"event": ""}, *events]):
            if event["event"] != "mark":
                for counts, _ in open_regions:
                    counts.add(event, previous["event"])
            elif event["name"] == "begin":
                open_regions.append((Counts(), event))
            elif event["name"] == "end":
                step = open_regions[0][1]
                counts, begin = open_regions.pop()
                counts.host_ns = event["host_ns"]
                needed = needed_bytes(begin, event, ranks)
                for outer, _ in [(counts, begin), *open_regions]:
                    outer.needed += needed
                if step["region"] == "step" and is_decode(step, batch):
                    found[begin["region"]].append(counts)
    return found


@dataclass(frozen=True, eq=False)
class Mode:
    """How vLLM is to run it. `options`: of its engine. `ranks`: devices that share heads and columns."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    cann: str = "8.3.rc1"

    @property
    def ranks(self) -> int:
        return self.options.get("tensor_parallel_size", 1)


TWO_DEVICES = {"tensor_parallel_size": 2}
EAGER = Mode("eager", {"enforce_eager": True})
PIECEWISE = Mode("piecewise")
FULL = Mode(
    "full decode graphs",
    {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY"}},
    {"ASCEND_EMULATOR_TND_WORKSPACE": "1"},
)
EAGER_ON_TWO = Mode("eager, TP=2", {"enforce_eager": True, **TWO_DEVICES})
PIECEWISE_ON_TWO = Mode("piecewise, TP=2", TWO_DEVICES)


def on_9_1(mode: Mode) -> Mode:
    """The same under vllm-ascend 0.23, which would choose full graphs by itself, of 83 sizes, and schedule a step ahead
    of its tokens."""
    graphs = {"cudagraph_mode": "PIECEWISE", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    chosen = {} if mode is EAGER else {"compilation_config": {**graphs, **mode.options.get("compilation_config", {})}}
    return Mode(mode.title, {"async_scheduling": False, **mode.options, **chosen}, mode.variables, "9.1")


EAGER_9_1, PIECEWISE_9_1, FULL_9_1 = (on_9_1(mode) for mode in (EAGER, PIECEWISE, FULL))


def trace(
    way: Way, directory: Path, mode: Mode = EAGER, *, batches: Sequence[int] = BATCHES, steps: int = STEPS
) -> dict[int, dict[str, list[Counts]]]:
    """Serves `batches` that way and counts: batch -> region -> one entry for each time."""
    # vllm-ascend's own padded rows reach its router as memory left them, which is undefined [R58]
    machine = Machine(
        mode.cann,
        devices=mode.ranks,
        trace=directory / "trace.jsonl",
        strict=way.plugin,
        triton=site_packages(COMPILER) if way.mxfp4 else None,
    )
    venv = find_venv(stack=machine.stack)
    trace_file, job_file = directory / "trace.jsonl", directory / "job.json"
    trace_file.write_text("")
    options = {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 1024,
        "gpu_memory_utilization": 0.5,
        **mode.options,
    }
    job = {
        "checkpoint": str(directory / ("mxfp4" if way.mxfp4 else "checkpoint")),
        "shape": {**SHAPE, "mxfp4": way.mxfp4},
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
            **environment(machine, venv),
            "OMP_NUM_THREADS": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "fork",  # with the marks
            "VLLM_LOGGING_LEVEL": "WARNING",
            **way.variables,
            **mode.variables,
        },
        capture_output=True,
        text=True,
        timeout=900,
    )
    if done.returncode:
        raise EmulationError(f"{way.title}, {mode.title}: not served:\n{(done.stdout + done.stderr)[-4000:]}")
    with trace_file.open() as lines:
        everything = list(lines)
    return {batch: read_trace(everything, batch, mode.ranks) for batch in batches}


def mean(counts: Sequence[Counts], name: str) -> float:
    return statistics.mean(getattr(entry, name) for entry in counts)


def host(counts: Sequence[Counts]) -> float:
    return statistics.median(entry.host_ns for entry in counts)


def over_roofline(counts: Sequence[Counts]) -> float:
    """Bytes moved over the bytes that the roofline counts."""
    return sum(entry.bytes for entry in counts) / sum(entry.needed for entry in counts)


def number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


Measured = Mapping[str, Mapping[int, Mapping[str, Sequence[Counts]]]]  # way or title -> batch -> region


def table(measured: Measured, *, two_devices: bool = False) -> list[str]:
    """One line a batch, region and way. Host times relative to ours of the same batch and region."""
    columns = ("batch", "in a layer", "path", "device ops", "host→device", "device→host", "syncs", "MB moved")
    last = "collectives" if two_devices else "host time"
    rows = []
    for batch in measured["ours"]:
        for region in ("attention", "experts", "layer"):
            ours = host(measured["ours"][batch][region])
            for name, results in measured.items():
                counts, way = results[batch].get(region), WAYS[name]
                if not counts:
                    continue
                cells = [str(batch), region, f"**{way.title}**" if name == "ours" else way.title]
                cells += [number(mean(counts, what)) for what in ("launches", "to_device", "to_host", "syncs")]
                cells.append(f"{mean(counts, 'bytes') / 1e6:.2f}")
                cells.append(f"{over_roofline(counts):.3f}" if way.plugin else "–")
                if two_devices:
                    cells.append(number(mean(counts, "collectives")))
                else:
                    cells.append(f"{host(counts) / ours:.2f}" if region != "layer" else "–")
                rows.append(cells)
    return markdown((*columns, "bytes / roofline", last), rows)


STEP_COLUMNS = {
    "device ops": "launches",
    "graph replays": "replays",
    "task updates": "updates",
    "collectives": "collectives",
    "host→device": "to_device",
    "device→host": "to_host",
    "syncs": "syncs",
}
MEGABYTES = ("read", "written", "bytes")
STACK_COLUMNS = {**{name: what for name, what in STEP_COLUMNS.items() if what != "collectives"}, "MB moved": "bytes"}


def step_table(measured: Measured, columns: Mapping[str, str] = STEP_COLUMNS) -> list[str]:
    """Whole decode steps, sampling and the runner's own work included."""
    rows = []
    for batch in BATCHES:
        for title, results in measured.items():
            if batch in results:
                counts = results[batch]["step"]
                rows.append((batch, title, *(cell(counts, name) for name in columns.values())))
    return markdown(("batch", "path", *columns), rows)


def cell(counts: Sequence[Counts], name: str) -> str:
    return f"{mean(counts, name) / 1e6:.2f}" if name in MEGABYTES else number(mean(counts, name))


# what is counted: the ways of each mode, and the batches
PLAN: tuple[tuple[Mode, tuple[str, ...], tuple[int, ...]], ...] = (
    (EAGER, tuple(WAYS), BATCHES),
    (PIECEWISE, ("article", "ours"), BATCHES),
    (FULL, ("ours",), BATCHES),
    (EAGER_ON_TWO, tuple(name for name, way in WAYS.items() if way.plugin), BATCHES[:2]),
    (PIECEWISE_ON_TWO, ("ours",), BATCHES[:2]),
)


STACKS: tuple[tuple[Mode, tuple[str, ...], tuple[int, ...]], ...] = (
    (EAGER, ("stock", "ours"), BATCHES[:2]),
    (EAGER_9_1, ("stock", "ours"), BATCHES[:2]),
    (PIECEWISE, ("ours",), BATCHES[:2]),
    (PIECEWISE_9_1, ("stock", "ours"), BATCHES[:2]),
    (FULL, ("ours",), BATCHES[:2]),
    (FULL_9_1, ("stock", "ours"), BATCHES[:2]),
)

WEIGHTS: tuple[tuple[Mode, tuple[str, ...], tuple[int, ...]], ...] = ((EAGER, tuple(FROM_MXFP4), BATCHES),)


def measure(
    directory: Path, plan: Iterable[tuple[Mode, tuple[str, ...], tuple[int, ...]]] = PLAN
) -> dict[Mode, dict[str, dict[int, dict[str, list[Counts]]]]]:
    found: dict[Mode, dict[str, Any]] = {}
    for mode, names, batches in plan:
        found[mode] = {}
        for name in names:
            way = (WAYS | FROM_MXFP4)[name]
            print(f"serving: {way.title}, {mode.title}", file=sys.stderr, flush=True)
            found[mode][name] = trace(way, directory, mode, batches=batches)
    return found


def page_text(found: Mapping[Mode, Mapping[str, Any]]) -> str:
    steps = {f"{WAYS[name].title}, {mode.title}": r for mode, results in found.items() for name, r in results.items()}
    return "\n".join(
        [
            *table(found[EAGER]),
            "",
            TWO_DEVICES_TITLE,
            "",
            *table(found[EAGER_ON_TWO], two_devices=True),
            "",
            "Whole decode steps; with TP=2, of each device:",
            "",
            *step_table(steps),
        ]
    )


def stacks_text(found: Mapping[Mode, Mapping[str, Any]]) -> str:
    steps = {
        f"{WAYS[name].title}, {mode.title}, {mode.cann[:3]}": r
        for mode, results in found.items()
        for name, r in results.items()
    }
    return "\n".join(step_table(steps, STACK_COLUMNS))


WEIGHT_COLUMNS = {"device ops": "launches", "MB read": "read", "MB written": "written", "MB moved": "bytes"}


def bytes_a_weight(counts: Sequence[Counts]) -> float:
    """Of the experts that were routed to; their biases and the activations are in it."""
    return BF16 * over_roofline(counts)


def weights_text(found: Mapping[Mode, Mapping[str, Any]]) -> str:
    rows = []
    for batch in BATCHES:
        for region in ("experts", "step"):
            for name, way in FROM_MXFP4.items():
                counts = found[EAGER][name][batch][region]
                cells = [cell(counts, what) for what in WEIGHT_COLUMNS.values()]
                last = f"{bytes_a_weight(counts):.2f}" if region == "experts" else "–"
                rows.append((batch, region, way.title, *cells, last))
    return "\n".join(markdown(("batch", "in a", "experts' weights", *WEIGHT_COLUMNS, "bytes a weight touched"), rows))


class PageError(Exception):
    """What the page lacks."""


def around(page: str, first: str = BEGIN) -> tuple[str, str]:
    """What stands before the table and behind it. Raises PageError where it has not one place."""
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(END)
    if not begin or not end or first in rest:
        raise PageError(f"{PAGE} needs one place for the table, between {first} and {END}")
    return before, after


# option -> where its table stands, what is counted for it, and the table
PARTS: dict[str, tuple[str, Any, Any]] = {
    "": (BEGIN, PLAN, page_text),
    "--stacks": (BEGIN.replace(": ", " --stacks: "), STACKS, stacks_text),
    "--packed": (BEGIN.replace(": ", " --packed: "), WEIGHTS, weights_text),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="put the tables into docs/performance.md")
    parts = parser.add_mutually_exclusive_group()
    for option, words in (
        ("--stacks", "decode steps on CANN 8.3 and 9.1 instead"),
        ("--packed", "bytes with experts in BF16 and packed in MXFP4 instead"),
    ):
        parts.add_argument(option, action="store_const", dest="part", const=option, default="", help=words)
    args = parser.parse_args(arguments)
    begin, plan, text_of = PARTS[args.part]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        if args.write:
            around(PAGE.read_text(encoding="utf-8"), begin)
        with tempfile.TemporaryDirectory() as directory:
            found = measure(Path(directory), plan)
    except (EmulatorError, PageError) as error:
        print(error, file=sys.stderr)
        return 2
    text = text_of(found)
    print(text)
    if args.write:
        before, after = around(PAGE.read_text(encoding="utf-8"), begin)  # as it is now
        half = PAGE.with_suffix(".new")
        half.write_text(f"{before}{begin}\n\n{text}\n\n{END}{after}", encoding="utf-8")
        half.replace(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
