"""Where the time of a decode step inside vLLM goes: the host's by phase and by function, the device's by kernel.

    python research/host_time.py DIR --out FILE [--batch N …] [--steps N] [--without NAME …]

Needs vLLM 0.33 and a GPU; with this package installed vLLM runs its model, with NPU_GPTOSS=0 its own. DIR: a
checkpoint; with few layers of full width the host is the bound. Two engines start together and are measured one after
the other: one in a single process, and one in vLLM's usual two. FILE is written after each part. `ms` is without any
profiler, with all of `SWITCHES` on, all off, and each of them alone; those of --without are always off. `phases` has
each phase's own microseconds; a phase within it is not in it. `functions` is by cProfile, which makes calls dearer:
read shares. `device` is by torch's profiler, which slows the host down: read what a graph takes, and what comes between
two.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import importlib
import json
import os
import pstats
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from research.children import Child, inside

WARM_UP_STEPS, PROMPT, ROUNDS, FUNCTIONS, PROFILED, KERNELS = 20, 1024, 3, 60, 40, 30
START_SECONDS, PART_SECONDS = 400, 120
PROCESSES = {"one process": "0", "two processes": "1"}
ENGINE: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "async_scheduling": True,
    "enable_prefix_caching": False,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 3 << 30,
    "max_model_len": 4096,
    "max_num_seqs": 256,  # as a server's: tables have a row for each
    "max_num_batched_tokens": 8192,
}

# What can be switched off while an engine runs: the names that it replaces, and whose value each of them is without it;
# None: below the repairs of serving/compat.
_STATE = "npu_gptoss.serving.cuda.state"
SWITCHES: dict[str, dict[str, str | None]] = {
    "unchanged-tables": {"vllm.v1.worker.gpu.buffer_utils:UvaBackedTensor.copy_to_uva": None},
    "unchanged-rows": {"vllm.v1.worker.gpu.model_runner:async_tensor_h2d": None},
    "unchanged-views": {"vllm.v1.worker.gpu.model_runner:build_slot_mappings_by_layer": None},
    "launches": {
        f"vllm.v1.worker.gpu.{module}:{kernel}": None
        for module, kernel in (
            ("input_batch", "_prepare_pos_seq_lens_kernel"),
            ("input_batch", "_combine_sampled_and_draft_tokens_kernel"),
            ("input_batch", "_post_update_kernel"),
            ("block_table", "_gather_block_tables_kernel"),
            ("block_table", "_compute_slot_mappings_kernel"),
            ("sample.gumbel", "_gumbel_sample_kernel"),
        )
    },
    "running": {
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": None,
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks": None,
    },
    "no-metadata": {
        f"{_STATE}:StepState.prepare_attn": "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn"
    },
    "plain-sampler": {f"{_STATE}:PlainSampler.__call__": "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__"},
}

_RUNNER, _GPU = "vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu"
PHASES: dict[str, tuple[str, ...]] = {
    "front: step, the rest": ("vllm.v1.engine.llm_engine:LLMEngine.step",),
    "front: WAIT for the engine": ("vllm.v1.engine.core_client:SyncMPClient.get_output",),
    "front: process outputs": ("vllm.v1.engine.output_processor:OutputProcessor.process_outputs",),
    "engine: step": (
        "vllm.v1.engine.core:EngineCoreProc._process_engine_step",
        "vllm.v1.engine.core_client:InprocClient.get_output",
    ),
    "engine: input queue": ("vllm.v1.engine.core:EngineCoreProc._process_input_queue",),
    "engine: schedule": ("vllm.v1.core.sched.async_scheduler:AsyncScheduler.schedule",),
    "engine: bitmask": ("vllm.v1.core.sched.async_scheduler:AsyncScheduler.get_grammar_bitmask",),
    "engine: update": ("vllm.v1.core.sched.async_scheduler:AsyncScheduler.update_from_output",),
    "engine thread: serialise": ("vllm.v1.serial_utils:MsgpackEncoder.encode_into",),
    "engine thread: send": ("vllm.v1.engine.core:EngineCoreProc._send_msg_tracking_payload",),
    "executor": (
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.execute_model",
        "vllm.v1.executor.uniproc_executor:UniProcExecutor.sample_tokens",
    ),
    "execute_model, the rest": (f"{_RUNNER}:GPUModelRunner.execute_model",),
    "requests": tuple(
        f"{_RUNNER}:GPUModelRunner.{name}"
        for name in ("finish_requests", "add_requests", "update_requests", "gather_batch_req_state")
    ),
    "sampler tables": (f"{_GPU}.sample.sampler:Sampler.apply_staged_writes",),
    "block tables": (f"{_GPU}.block_table:BlockTables.apply_staged_writes",),
    "choose graph": (f"{_RUNNER}:dispatch_cg_and_sync_dp",),
    "prepare_inputs, the rest": (f"{_RUNNER}:GPUModelRunner.prepare_inputs",),
    "to device": (f"{_RUNNER}:async_tensor_h2d",),
    "Triton: positions": (f"{_RUNNER}:prepare_pos_seq_lens",),
    "Triton: tokens": (f"{_RUNNER}:combine_sampled_and_draft_tokens",),
    "Triton: block tables": (f"{_GPU}.block_table:BlockTables.gather_block_tables",),
    "Triton: slots": (f"{_GPU}.block_table:BlockTables.compute_slot_mappings",),
    "slots by layer": (f"{_RUNNER}:build_slot_mappings_by_layer",),
    "metadata": (f"{_GPU}.model_states.default:DefaultModelState.prepare_attn", f"{_STATE}:StepState.prepare_attn"),
    "graph": (f"{_GPU}.cudagraph_utils:ModelCudaGraphManager.run_fullgraph",),
    "sample_tokens, the rest": (f"{_RUNNER}:GPUModelRunner.sample_tokens",),
    "gather hidden": (f"{_RUNNER}:GPUModelRunner.sample",),
    "head": ("npu_gptoss.serving.cuda.model:GptOssForCausalLM.compute_logits",),
    "sampler": (f"{_GPU}.sample.sampler:Sampler.__call__", f"{_STATE}:PlainSampler.__call__"),
    "Triton: draw": (f"{_GPU}.sample.sampler:gumbel_sample", f"{_STATE}:gumbel_sample"),
    "Triton: counts": (f"{_GPU}.sample.sampler:get_num_sampled_and_rejected",),
    "copy out": (f"{_RUNNER}:AsyncOutput.__init__",),
    "Triton: update": (f"{_RUNNER}:post_update",),
    "output to lists": (f"{_RUNNER}:AsyncOutput.get_output",),
    "WAIT for the device": ("torch.cuda:Event.synchronize",),
}
STEP = "graph"  # once a step


def place(path: str) -> tuple[Any, str]:
    """Whose attribute, and its name. Raises ImportError or AttributeError where it is not here."""
    module, _, names = path.partition(":")
    owner: Any = importlib.import_module(module)
    *parents, name = names.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    getattr(owner, name)
    return owner, name


# -- in the engine's process


_before: dict[str, Any] = {}


def switch(_: Any, off: Sequence[str]) -> list[str]:
    """Those named off, all others on. Returns what is not here."""
    absent = []
    for name, places in SWITCHES.items():
        for path, without in places.items():
            try:
                owner, attribute = place(path)
                value = _before.setdefault(path, vars(owner)[attribute])
                if name in off:
                    value = getattr(*place(without)) if without else below(value)
            except (ImportError, AttributeError, KeyError):
                absent.append(name)
            else:
                setattr(owner, attribute, value)
    return absent


def below(value: Any) -> Any:
    while hasattr(value, "__npu_gptoss_replaces__"):
        value = value.__npu_gptoss_replaces__
    return value


class Phases:
    """Each phase's own seconds and calls, by the thread's stack of phases."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.calls: dict[str, int] = defaultdict(int)
        self._local = threading.local()
        self._undo: list[tuple[Any, str, Any]] = []
        self.absent: list[str] = []

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        local, spent, calls, clock = self._local, self.spent, self.calls, time.perf_counter

        @functools.wraps(function)
        def timing(*args: Any, **kwargs: Any) -> Any:
            stack = local.__dict__.setdefault("stack", [])
            stack.append(0.0)
            start = clock()
            try:
                return function(*args, **kwargs)
            finally:
                whole = clock() - start
                spent[phase] += whole - stack.pop()
                calls[phase] += 1
                if stack:
                    stack[-1] += whole

        return timing

    def put_in(self, of: str = "") -> None:
        """Those whose names begin with `of`."""
        for phase, paths in PHASES.items():
            for path in paths if phase.startswith(of) else ():
                try:
                    owner, name = place(path)
                except (ImportError, AttributeError):
                    self.absent.append(path)
                    continue
                value, timing = vars(owner).get(name), self.timed(phase, getattr(owner, name))
                self._undo.append((owner, name, value))
                setattr(owner, name, staticmethod(timing) if isinstance(value, staticmethod) else timing)

    def take_out(self) -> None:
        for owner, name, value in reversed(self._undo):
            if value is None:
                delattr(owner, name)
            else:
                setattr(owner, name, value)

    def told(self, steps: int) -> dict[str, Any]:
        """Microseconds a step, in the order of PHASES, and their sum without waiting and without other threads."""
        steps = self.calls.get(STEP) or steps
        rows = {
            phase: {"own_us": round(self.spent[phase] / steps * 1e6, 1), "calls": round(self.calls[phase] / steps, 2)}
            for phase in PHASES
            if self.calls.get(phase)
        }
        busy = sum(row["own_us"] for phase, row in rows.items() if "WAIT" not in phase and "thread" not in phase)
        return {"steps": steps, "busy_us": round(busy, 1), "phases": rows, "absent": self.absent}


_phases: Phases | None = None


def begin_phases(_: Any) -> None:
    global _phases
    _phases = Phases()
    _phases.put_in()


def reset_phases(_: Any) -> None:
    assert _phases is not None
    _phases.spent.clear()
    _phases.calls.clear()


def end_phases(_: Any, steps: int) -> dict[str, Any]:
    assert _phases is not None
    told = _phases.told(steps)
    _phases.take_out()
    return told


# -- in a child


def child() -> None:
    hear, say = inside()
    settings = hear()
    from vllm import LLM

    sizes = sorted(settings["batch"])
    llm = LLM(settings["model"], compilation_config={"cudagraph_capture_sizes": sizes}, **ENGINE | settings["engine"])
    # by its name as a module: the engine's process must find the functions that it is sent
    here = importlib.import_module("research.host_time")
    measured = here.Measured(llm, settings["alone"])
    say("ready")
    while True:
        question = hear()
        try:
            say(getattr(measured, question.pop("part"))(**question))
        except Exception as error:  # of one part: the others' numbers are worth having
            say({"error": f"{type(error).__name__}: {error}"[:2000]})


class Measured:
    """An engine, and what is asked of it."""

    def __init__(self, llm: Any, alone: bool) -> None:
        self.llm, self.alone = llm, alone
        self.vocabulary = llm.model_config.get_vocab_size()

    def act(self, function: Callable[..., Any], *args: Any) -> Any:
        """In the engine's process, between two steps."""
        return function(None, *args) if self.alone else self.llm.llm_engine.collective_rpc(function, args=args)[0]

    def ms(self, batch: int, steps: int, off: Sequence[str]) -> dict[str, Any]:
        absent = self.act(switch, list(off))
        times = decode(self.llm.llm_engine, self.vocabulary, batch, steps)
        return {"mean": statistics.fmean(times), "median": statistics.median(times), "absent": absent}

    def phases(self, batch: int, steps: int, off: Sequence[str]) -> dict[str, Any]:
        self.act(switch, list(off))
        self.act(begin_phases)
        front = Phases()
        if not self.alone:
            front.put_in("front")
        try:
            times = decode(self.llm.llm_engine, self.vocabulary, batch, steps, begin=lambda: self.act(reset_phases))
        finally:  # the last tokens' steps are in it too, they are alike
            told = self.act(end_phases, steps)
            front.take_out()
        told["front"] = front.told(steps + 2 * WARM_UP_STEPS)["phases"]
        return {"ms": round(statistics.fmean(times), 4)} | told

    def functions(self, batch: int, steps: int, off: Sequence[str]) -> list[dict[str, Any]]:
        self.act(switch, list(off))
        profile = cProfile.Profile()
        decode(self.llm.llm_engine, self.vocabulary, batch, steps, begin=profile.enable, end=profile.disable)
        return functions(profile, steps)

    def device(self, batch: int, steps: int, off: Sequence[str]) -> dict[str, Any]:
        import torch

        self.act(switch, list(off))
        chosen = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            chosen.append(torch.profiler.ProfilerActivity.CUDA)
        profile = torch.profiler.profile(activities=chosen)
        decode(self.llm.llm_engine, self.vocabulary, batch, steps, begin=profile.start, end=profile.stop)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return device(events)


def decode(
    engine: Any,
    vocabulary: int,
    batch: int,
    count: int,
    begin: Callable[[], Any] = lambda: None,
    end: Callable[[], Any] = lambda: None,
) -> list[float]:
    """Milliseconds between `count` consecutive outputs in which each of `batch` requests has a new token."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(
        temperature=0,
        max_tokens=count + 2 * WARM_UP_STEPS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    draw = random.Random(batch)
    for number in range(batch):
        prompt = [draw.randrange(vocabulary) for _ in range(PROMPT)]
        engine.add_request(f"{time.time_ns()}-{number}", {"prompt_token_ids": prompt}, params)
    ends: list[float] = []
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if len(ends) > WARM_UP_STEPS + count or not outputs:
            continue
        if len(outputs) < batch:
            ends = []
            continue
        ends.append(time.perf_counter())
        if len(ends) == WARM_UP_STEPS + 1:
            begin()
            ends[-1] = time.perf_counter()
        if len(ends) == WARM_UP_STEPS + 1 + count:
            end()
    if len(ends) <= WARM_UP_STEPS + count:
        raise RuntimeError(f"no {count} steady steps in a row at batch {batch}")
    return [(later - earlier) * 1e3 for earlier, later in pairwise(ends[WARM_UP_STEPS:])]


def functions(profile: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """Own and whole microseconds a step, and calls a step, the dearest first."""
    found = [
        {
            "function": f"{'/'.join(Path(file).parts[-3:])}:{line} {name}",
            "own_us": round(own / steps * 1e6, 1),
            "whole_us": round(whole / steps * 1e6, 1),
            "calls": round(calls / steps, 2),
        }
        for (file, line, name), (_, calls, own, whole, _) in pstats.Stats(profile).stats.items()
    ]
    return sorted(found, key=lambda row: -row["own_us"])[:FUNCTIONS]


def device(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of a Chrome trace: what a graph takes on the device, what lies between two, and what launching took the host."""
    work = sorted(
        (
            event
            for event in events
            if event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        ),
        key=lambda event: event["ts"],
    )
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    launched = {event["args"].get("correlation") for event in calls if "GraphLaunch" in event["name"]}
    if not work or not launched:
        return {"error": f"{len(work)} pieces of work on the device and {len(launched)} launched graphs in the trace"}
    graphs: dict[int, list[dict[str, Any]]] = defaultdict(list)
    others = []
    for event in work:
        correlation = event.get("args", {}).get("correlation")
        (graphs[correlation] if correlation in launched else others).append(event)
    spans = sorted((span(own), own) for own in graphs.values())
    rows, between = [], defaultdict(list)
    for ((first, last), own), ((following, _), _) in pairwise(spans):
        inside_gap = [event for event in others if last <= event["ts"] < following]
        for event in inside_gap:
            between[event["name"][:100]].append(event["dur"])
        rows.append(
            {
                "period_us": following - first,
                "graph_us": last - first,
                "graph_kernels": len(own),
                "graph_kernels_sum_us": sum(event["dur"] for event in own),
                "graph_idle_us": last - first - union(own),
                "graph_overlaps": overlaps(own),
                "between_us": following - last,
                "between_kernels": len(inside_gap),
                "between_busy_us": union(inside_gap),
                "during_others": sum(first <= event["ts"] < last for event in others),
            }
        )
    if not rows:
        return {"error": "one graph in the trace"}
    spent = defaultdict(list)
    for event in calls:
        spent[event["name"]].append(event.get("dur", 0))
    return {
        "steps": len(rows),
        "medians": {name: round(statistics.median(row[name] for row in rows), 1) for name in rows[0]},
        "between": per_step(between, len(rows)),
        "host_calls": per_step(spent, len(spans)),
    }


def per_step(found: dict[str, list[float]], steps: int) -> list[dict[str, Any]]:
    rows = [
        {"name": name, "calls": round(len(times) / steps, 2), "us": round(sum(times) / steps, 2)}
        for name, times in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:KERNELS]


def span(events: Sequence[dict[str, Any]]) -> tuple[float, float]:
    return min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)


def union(events: Sequence[dict[str, Any]]) -> float:
    """Time in which at least one of them ran."""
    total, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        begin, until = max(event["ts"], end), event["ts"] + event["dur"]
        total += max(0.0, until - begin)
        end = max(end, until)
    return total


def overlaps(events: Sequence[dict[str, Any]]) -> int:
    """How many began before the one before them had ended: programmatic dependent launches do."""
    ordered = sorted(events, key=lambda event: event["ts"])
    return sum(later["ts"] < earlier["ts"] + earlier["dur"] for earlier, later in pairwise(ordered))


# -- in the parent


def variants(without: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """A name, and what is off."""
    on = [name for name in SWITCHES if name not in without]
    yield "on", list(without)
    yield "off", list(SWITCHES)
    for name in on if len(on) > 1 else ():
        yield f"only {name}", [other for other in SWITCHES if other != name]


def measure(args: argparse.Namespace, start: Callable[..., Child]) -> dict[str, Any]:
    found: dict[str, Any] = {"model": str(args.model), "steps": args.steps, "without": args.without}
    began = time.perf_counter()

    def save() -> None:
        found["seconds"] = round(time.perf_counter() - began, 1)
        args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        children = {}
        for name in PROCESSES:
            children[name] = start(args, name, Path(logs))
            stack.callback(children[name].end)
        for name, child in children.items():
            try:
                child.hear(START_SECONDS)
                for key, value in parts(args, name, child):
                    found.setdefault(name, {})[key] = value
                    print(name, key, json.dumps(brief(value)), flush=True)
                    save()
            except RuntimeError as error:
                found.setdefault(name, {})["error"] = str(error)
                print(error, file=sys.stderr, flush=True)
                save()
            child.end()
    return found


def parts(args: argparse.Namespace, name: str, child: Child) -> Iterator[tuple[str, Any]]:
    """What is measured of an engine, the least that may be lost first."""
    for batch in args.batch:
        times: dict[str, list[Any]] = defaultdict(list)
        chosen = dict(variants(args.without))
        if batch != min(args.batch) or name != "one process":
            chosen = {key: chosen[key] for key in ("on", "off")}
        for _ in range(ROUNDS):  # in turn: a clock that drifts is in all of them
            for key, off in chosen.items():
                times[key].append(
                    child.ask({"part": "ms", "batch": batch, "steps": args.steps, "off": off}, PART_SECONDS)
                )
        yield f"ms, batch {batch}", {key: merged(rounds) for key, rounds in times.items()}
    asked = [("phases", args.without, args.steps), ("phases", list(SWITCHES), args.steps)]
    if name == "one process":
        asked += [("device", args.without, PROFILED), ("functions", args.without, args.steps)]
    for part, off, steps in asked:
        for batch in args.batch:
            key = f"{part}, batch {batch}" + (", off" if off == list(SWITCHES) else "")
            yield key, child.ask({"part": part, "batch": batch, "steps": steps, "off": off}, PART_SECONDS)


def merged(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    errors = [row["error"] for row in rounds if "error" in row]
    if errors:
        return {"error": errors[0]}
    means = [round(row["mean"], 4) for row in rounds]
    medians = [round(row["median"], 4) for row in rounds]
    return {
        "ms": statistics.median(means),
        "median_ms": statistics.median(medians),
        "means": means,
        "absent": rounds[0]["absent"],
    }


def brief(value: Any) -> Any:
    """What is printed of a part."""
    if isinstance(value, list):
        return value[:25]
    return {key: rows[:12] if isinstance(rows, list) else rows for key, rows in value.items()}


def start(args: argparse.Namespace, name: str, logs: Path) -> Child:
    alone = PROCESSES[name] == "0"
    root = str(Path(__file__).resolve().parents[1])
    environment = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": PROCESSES[name],
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions of this file, to its own engine
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
    }
    child = Child(name, [sys.executable, __file__, "--child"], logs / name.replace(" ", "-"), environment)
    child.tell({"model": str(args.model), "batch": args.batch, "alone": alone, "engine": args.engine})
    return child


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--without", nargs="+", choices=SWITCHES, default=[], metavar="NAME", help=", ".join(SWITCHES))
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of vLLM's LLM")
    measure(parser.parse_args(arguments), start)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
        os._exit(0)  # without a tokenizer vLLM does not end by itself
    sys.exit(main())
