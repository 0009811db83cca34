"""Time per output token of the offline engine in steady decode: a batch of requests, all at about the same context.

Each request gets a random prompt of `context` tokens, computed as any prompt is; then every step generates one token of
each. TPOT is the mean time between the ends of such steps, sampling and all host work included, over the first `steps`
of them after a warm-up. Keys that a step sees are counted as they were, experts from the routing of one more step.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from npu_gptoss.bench import session
from npu_gptoss.bench.measure import kernels_of, recording, synchronize
from npu_gptoss.bench.roofline import decode_work
from npu_gptoss.bench.session import DoesNotFit, Running
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.engine.request import Request
from npu_gptoss.engine.scheduler import Chunk
from npu_gptoss.kernels.profiling import observing

ROUTED = "topk_ids"  # the argument of every kernel of moe.experts that names the experts, [tokens, k]
WARM_UP_STEPS = 4  # steady steps before the first that counts: graphs captured, kernels compiled and tuned
DEFINITIONS = {
    "tpot_ms": "mean milliseconds between the ends of consecutive steps in which every request of the batch generates "
    "exactly one token, host work and greedy sampling included; tpot_median_ms is their median, "
    "tpot_p10_ms and tpot_p90_ms what a tenth and nine tenths of them stay below",
    "context": "tokens of each random prompt; a step sees those and the tokens generated so far (mean_keys a request)",
    "floor_ms": "the larger of bytes / bandwidth and operations / arithmetic rate at the first of `ceilings`, from the "
    "keys seen and the distinct experts of the run's own routing (distinct_experts; expected under uniform routing "
    "where distinct_source says so); floor_measured_ms: at the ceilings measured in the same run; floor_uniform_ms: "
    "from `context` and uniform routing; of several GPUs at the sum of their ceilings",
    "layout": "tp1: one GPU; tpN: N GPUs, attention cut by heads, lm_head by rows, each expert through its middle; "
    "epN: the experts dealt out whole instead",
    "bytes": "weights of projections, routers, head and distinct experts once, visible keys and values once, and six "
    "reads and six writes of the residual stream a layer",
    "TBps": "bytes / tpot",
    "TFLOPs": "operations (two a multiply-add, four a visible key and channel) / tpot",
    "percent_of_floor": "100 * floor / tpot",
    "dollars_per_million_tokens": "of generated tokens, at dollars_per_gpu_hour for each of `gpus`",
}


@dataclass(frozen=True)
class DecodeRun:
    """The observation: the seconds between steps, and the keys that each request saw in the middle step."""

    step_s: tuple[float, ...]
    contexts: tuple[int, ...]
    distinct: tuple[int, ...] | None  # experts of each layer in one step; None: the routing could not be seen

    @property
    def mean_s(self) -> float:
        return statistics.fmean(self.step_s)


class _Enough(Exception):
    """Ends `generate` once everything is measured; the engine forgets the requests."""


class SteadySteps:
    """Watches an engine's steps (`on_step`) and keeps the ends of steps in which all requests advance by one."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine = engine
        self._steps = steps
        self._before: list[int] = []
        self.ends: list[float] = []
        self.contexts: tuple[int, ...] = ()
        self.distinct: tuple[int, ...] | None = None

    def __call__(self, requests: Sequence[Request]) -> None:
        now = time.perf_counter()
        generated = [request.num_generated for request in requests]
        before, self._before = self._before, generated
        steady = bool(before) and all(old >= 1 and new == old + 1 for old, new in zip(before, generated, strict=True))
        if not steady:
            self.ends.clear()  # a prompt was still being computed, or a request was preempted
            return
        self.ends.append(now)
        if len(self.ends) == WARM_UP_STEPS + self._steps // 2 + 1:
            # the last generated token is not among the step's keys: it is the next step's input
            self.contexts = tuple(len(request.token_ids) - 1 for request in requests)
        if len(self.ends) > WARM_UP_STEPS + self._steps:
            self.finish()
            raise _Enough

    def finish(self) -> None:
        """Called after the last step that counts, while the requests are still there."""
        self.distinct = distinct_experts(self._engine)

    def run(self) -> DecodeRun:
        ends = self.ends[WARM_UP_STEPS:]
        return DecodeRun(tuple(later - earlier for earlier, later in pairwise(ends)), self.contexts, self.distinct)


# --- the experts that a step's tokens are routed to


class RoutingSeen:
    """Keeps the number of distinct experts of each call that says which experts its tokens go to."""

    def __init__(self) -> None:
        self._ids: list[torch.Tensor] = []

    def __call__(self, name: str, arguments: Mapping[str, Any]) -> None:
        ids = arguments.get(ROUTED)
        if name.startswith("moe.experts") and isinstance(ids, torch.Tensor):
            self._ids.append(ids.clone())  # a graph or the next layer may write to the same memory

    def distinct(self, num_experts: int) -> tuple[int, ...]:
        """Of each call, in order; ids outside the experts (of unwritten slots) do not count."""
        return tuple(int(ids[(ids >= 0) & (ids < num_experts)].unique().numel()) for ids in self._ids)


@torch.inference_mode()
def distinct_experts(engine: Engine) -> tuple[int, ...] | None:
    """Of each layer, in the engine's next step or the one on its way, computed once more without a graph.

    Its rows are the newest token of every running request whose prompt is done. The scheduler is not asked: with a step
    launched ahead it counts that token as computed. The step's own keys are written where the engine writes the same
    ones, nothing else changes. None when the engine has nothing to run or its kernels do not show their routing.
    """
    chunks = [
        Chunk(request, len(request.token_ids) - 1, len(request.token_ids))
        for request in engine.scheduler.running
        if request.num_generated and engine.scheduler.allocator.grow(request.block_ids, len(request.token_ids))
    ]
    if not chunks:
        return None
    seen = RoutingSeen()
    with kernels_for(engine.device), observing(seen):
        batch = pack(chunks, engine.block_size, engine.device)
        engine.model.forward(batch.input_ids, batch.positions, engine.kv_caches, batch.metadata)
    distinct = seen.distinct(engine.config.num_local_experts)
    return distinct if len(distinct) == engine.config.num_hidden_layers else None


# --- one point


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids from the whole vocabulary, the same for the same arguments."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()


def check_fits(engine: Engine, batch: int, tokens: int) -> None:
    """Refuses a batch that does not fit the cache at once, or that the engine would not run together."""
    scheduler = engine.scheduler
    blocks = batch * math.ceil(tokens / engine.block_size)
    if blocks > scheduler.allocator.num_blocks:
        raise DoesNotFit(
            f"{batch} requests of {tokens} tokens need {blocks} blocks of {engine.block_size}, the cache has "
            f"{scheduler.allocator.num_blocks}: measure smaller ones, or give it more with --num-blocks"
        )
    if batch > scheduler.max_batch_size:
        raise DoesNotFit(f"the engine runs {scheduler.max_batch_size} requests at once, got a batch of {batch}")


class ProfiledSteps(SteadySteps):
    """Records the device's kernels of exactly the steps that otherwise are timed.

    It waits for the step in flight before recording starts; a step in flight at the end is waited for and counts.
    """

    def __call__(self, requests: Sequence[Request]) -> None:
        if len(self.ends) == WARM_UP_STEPS:
            synchronize(self._engine.device)
            self.recorded = recording(self._engine.device)
            self.recorded.start()
        super().__call__(requests)

    def finish(self) -> None:
        synchronize(self._engine.device)
        self.recorded.stop()


def run_decode(engine: Engine, batch: int, context: int, steps: int) -> DecodeRun:
    """Measures one point. Raises InputError where the cache or the context is too small for it."""
    watch = SteadySteps(engine, steps)
    _decode(engine, batch, context, steps, watch)
    return watch.run()


def profile_decode(engine: Engine, batch: int, context: int, steps: int = 8) -> list[dict[str, Any]]:
    """The device's kernels of one step, as the mean of `steps`, longest first."""
    watch = ProfiledSteps(engine, steps)
    _decode(engine, batch, context, steps, watch)
    return kernels_of(watch.recorded, engine.device, steps)


def _decode(engine: Engine, batch: int, context: int, steps: int, watch: SteadySteps) -> None:
    # requests whose prompts are done early generate while others' are still computed
    ahead = math.ceil(batch * context / engine.scheduler.max_batch_tokens) + batch
    tokens = WARM_UP_STEPS + steps + 3 + ahead
    check_fits(engine, batch, context + tokens)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    prompts = random_prompts(batch, context, engine.config.vocab_size, 0)
    try:
        engine.generate(prompts, params, on_step=watch)
    except _Enough:
        return
    raise AssertionError(f"{tokens} tokens were generated without {steps} steady steps in a row")


def measure(running: Running, batch: int, context: int) -> dict[str, Any]:
    return record(running, run_decode(running.engine, batch, context, running.args.steps), batch, context)


def record(running: Running, run: DecodeRun, batch: int, context: int) -> dict[str, Any]:
    """A row of `records`: the run and its floors."""
    config, seconds = running.engine.config, run.mean_s
    work = decode_work(config, run.contexts, running.form, run.distinct)
    uniform = decode_work(config, [context] * batch, running.form)
    milliseconds = np.array(run.step_s) * 1e3
    low, middle, high = map(float, np.percentile(milliseconds, (10, 50, 90)))
    return {
        **running.priced(work, seconds, batch),
        "batch": batch,
        "context": context,
        "tpot_ms": seconds * 1e3,
        "tpot_median_ms": middle,
        "tpot_min_ms": float(milliseconds.min()),
        "tpot_p10_ms": low,
        "tpot_p90_ms": high,
        "steps": len(run.step_s),
        "mean_keys": sum(run.contexts) / batch,
        "distinct_experts": None if run.distinct is None else sum(run.distinct) / config.num_hidden_layers,
        "distinct_source": "uniform" if run.distinct is None else "counted",
        "floor_uniform_ms": uniform.floor_s(running.ceilings[0]) * 1e3,
    }


def line(record: dict[str, Any]) -> str:
    """One row of the printed table."""
    distinct = record["distinct_experts"]
    return (
        "{model:>6} {weights:>6} {layout:>6} {batch:>6} {context:>8} {tpot_ms:>9.3f} {floor_ms:>9.3f} "
        "{percent_of_floor:>6.1f}% {GB:>8.2f} {TBps:>6.3f} {TFLOPs:>7.2f} {distinct:>8} {tokens_per_s:>9.1f} "
        "{dollars_per_million_tokens:>8.3f}"
    ).format(**record, GB=record["bytes"] / 1e9, distinct="-" if distinct is None else f"{distinct:.2f}")


KIND = session.Kind(
    what="decode",
    definitions=DEFINITIONS,
    head=f"{'model':>6} {'expert':>6} {'layout':>6} {'batch':>6} {'context':>8} {'TPOT ms':>9} {'floor ms':>9} "
    f"{'floor':>7} {'GB':>8} {'TB/s':>6} {'TFLOP/s':>7} {'distinct':>8} {'tok/s':>9} {'$/Mtok':>8}",
    line=line,
    points=lambda args: {f"batch {b}, context {c}": (b, c) for c in args.context for b in args.batch},
    measure=measure,
    profile=profile_decode,
    options=("--batch", "--context", "--steps", "--profile", "--json"),
)
