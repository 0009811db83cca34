"""Time to the first token of the offline engine: one prompt, nothing else under way, an empty cache."""

from __future__ import annotations

import statistics
import time
from typing import Any

from npu_gptoss.bench import session
from npu_gptoss.bench.decode import check_fits, random_prompts
from npu_gptoss.bench.measure import device_kernels
from npu_gptoss.bench.roofline import prefill_work
from npu_gptoss.bench.session import Running
from npu_gptoss.engine import Engine, SamplingParams

DEFINITIONS = {
    "prefill_s": "median seconds from handing one random prompt to the idle engine to its first token, over `repeats` "
    "different prompts after one that does not count; host work and sampling included",
    "floor_ms": "the larger of bytes / bandwidth and operations / arithmetic rate at the first of `ceilings`; "
    "floor_measured_ms: at those measured in the same run; of several GPUs at the sum of their ceilings",
    "layout": "tp1: one GPU; tpN: N GPUs, attention cut by heads, each expert through its middle; epN: the experts "
    "dealt out whole instead",
    "flops": "two a multiply-add of every product, four experts a token, the head once; four a visible (query, key, "
    "channel), of which a causal full layer has n * n / 2 keys and a window layer n * 128",
    "TBps": "bytes / prefill_s; each weight once",
    "TFLOPs": "flops / prefill_s",
    "percent_of_floor": "100 * floor / prefill_s",
    "dollars_per_million_tokens": "of prompt tokens, at dollars_per_gpu_hour for each of `gpus`",
}
FIRST_TOKEN = SamplingParams(max_tokens=1, ignore_eos=True)


def run_prefill(engine: Engine, tokens: int, repeats: int) -> list[float]:
    """Seconds to the first token of `repeats` prompts. Raises DoesNotFit where the cache is too small."""
    check_fits(engine, 1, tokens + 1)
    times = []
    for prompt in random_prompts(repeats + 1, tokens, engine.config.vocab_size, 0):
        start = time.perf_counter()
        engine.generate([prompt], FIRST_TOKEN)
        times.append(time.perf_counter() - start)
    return times[1:]


def profile_prefill(engine: Engine, tokens: int) -> list[dict[str, Any]]:
    """The device's kernels of one prompt, from an empty cache to its first token, longest first."""
    prompt = random_prompts(1, tokens, engine.config.vocab_size, 0)
    return device_kernels(lambda: engine.generate(prompt, FIRST_TOKEN), engine.device)


def measure(running: Running, tokens: int) -> dict[str, Any]:
    """The record of one length."""
    engine, args = running.engine, running.args
    times = run_prefill(engine, tokens, args.repeats)
    seconds = statistics.median(times)
    work = prefill_work(engine.config, tokens, running.form)
    return {
        **running.priced(work, seconds, tokens),
        "prompt_tokens": tokens,
        "prefill_s": seconds,
        "prefill_min_s": min(times),
        "prefill_max_s": max(times),
        "repeats": len(times),
        "max_batch_tokens": engine.scheduler.max_batch_tokens,
    }


def line(record: dict[str, Any]) -> str:
    """One row of the printed table."""
    return (
        "{model:>6} {weights:>6} {layout:>6} {prompt_tokens:>8} {prefill_s:>10.4f} {floor_s:>9.4f} "
        "{percent_of_floor:>6.1f}% {TFLOPs:>8.2f} {TBps:>6.3f} {tokens_per_s:>10.1f} {dollars_per_million_tokens:>8.4f}"
    ).format(**record, floor_s=record["floor_ms"] / 1e3)


KIND = session.Kind(
    what="prefill",
    definitions=DEFINITIONS,
    head=f"{'model':>6} {'expert':>6} {'layout':>6} {'tokens':>8} {'TTFT s':>10} {'floor s':>9} {'floor':>7} "
    f"{'TFLOP/s':>8} {'TB/s':>6} {'tok/s':>10} {'$/Mtok':>8}",
    line=line,
    points=lambda args: {f"{tokens} tokens": (tokens,) for tokens in args.tokens},
    measure=measure,
    profile=profile_prefill,
    options=("--tokens", "--repeats", "--profile", "--json"),
)
