"""Where the host's time of a decode step inside vLLM goes: with few layers the device is done long before it.

    python research/host_time.py DIR --out FILE [--batch N …] [--steps N]

Needs vLLM 0.33 and a GPU; with this package installed vLLM runs its model, with NPU_GPTOSS=0 its own. DIR: a checkpoint
with few layers of full width. The engine runs in this process. `ms` is without a profiler; `functions` are those with
the most time of their own in as many steps under cProfile, which makes calls dearer: read shares, not sums.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import statistics
import time
from pathlib import Path
from typing import Any

WARM_UP_STEPS, PROMPT, ROUNDS, FUNCTIONS = 20, 1024, 3, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    config = json.loads((args.model / "config.json").read_text(encoding="utf-8"))
    llm = LLM(
        str(args.model),
        skip_tokenizer_init=True,
        async_scheduling=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.3,
        max_model_len=8192,
        max_num_seqs=max(args.batch),
        compilation_config={"cudagraph_capture_sizes": sorted(args.batch)},
    )
    rows = []
    for batch in args.batch:
        times = [steps(llm.llm_engine, config, batch, args.steps) for _ in range(ROUNDS)]
        profile = cProfile.Profile()
        steps(llm.llm_engine, config, batch, args.steps, profile)
        told = functions(profile, args.steps)
        rows.append({"batch": batch, "ms": round(statistics.median(times), 4), "functions": told})
        print(json.dumps(rows[-1] | {"functions": told[:25]}, indent=1), flush=True)
    found = {"model": str(args.model), "layers": config["num_hidden_layers"], "steps": args.steps, "records": rows}
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os._exit(0)  # without a tokenizer vLLM does not end by itself


def steps(
    engine: Any, config: dict[str, Any], batch: int, count: int, profile: cProfile.Profile | None = None
) -> float:
    """Milliseconds a step of `batch` requests that all decode."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count + 2 * WARM_UP_STEPS, ignore_eos=True, detokenize=False)
    draw = random.Random(0)
    for number in range(batch):
        prompt = [draw.randrange(config["vocab_size"]) for _ in range(PROMPT)]
        engine.add_request(f"{time.time_ns()}-{number}", {"prompt_token_ids": prompt}, params)
    for _ in range(WARM_UP_STEPS):
        engine.step()
    start = time.perf_counter()
    if profile is not None:
        profile.enable()
    for _ in range(count):
        engine.step()
    if profile is not None:
        profile.disable()
    seconds = time.perf_counter() - start
    while engine.has_unfinished_requests():
        engine.step()
    return seconds / count * 1e3


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


if __name__ == "__main__":
    main()
