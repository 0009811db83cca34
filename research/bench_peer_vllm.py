"""Measures vLLM's engine with the definitions of `npu-gptoss bench`: stock vLLM, or vLLM with this package's model.

    python research/bench_peer_vllm.py --model DIR --out DIR [--batch N …] [--context N …] [--tokens N …]

Needs vLLM (0.25.1 and 0.33.0 were used) and a GPU. Where vLLM 0.33 loads this package's plugin, the plugin's model is
measured and the records say so; NPU_GPTOSS=0 leaves gpt-oss to vLLM. Set VLLM_USE_FLASHINFER_SAMPLER=0 where flashinfer
is not installed. Writes decode.json and prefill.json, which `npu-gptoss bench compare` lays beside records of the
same checkpoint and machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from npu_gptoss.bench.decode import WARM_UP_STEPS, random_prompts
from npu_gptoss.bench.provenance import machine, versions
from npu_gptoss.bench.random_checkpoint import model_name
from npu_gptoss.bench.records import SCHEMA
from npu_gptoss.files import write_atomically
from npu_gptoss.model.config import GptOssConfig

TOKENS_PER_STEP = 16384
MOST_TOKENS = 300_000  # batch * context: larger points are left out
DEFINITIONS = {
    "decode": {
        "tpot_ms": "mean milliseconds between consecutive outputs of the engine in which every request of the batch "
        "has exactly one new token, after four that do not count; greedy, default CUDA graphs",
        "context": "tokens of each random prompt",
    },
    "prefill": {
        "prefill_s": "median seconds from adding one random prompt to the idle engine to its first token, over "
        "`repeats` different prompts after one that does not count"
    },
}


def document(
    what: str, definitions: dict[str, str], settings: dict[str, Any], rows: Sequence[Any], *, ours: bool = False
) -> dict[str, Any]:
    """A record file in the form of `npu-gptoss bench`. ours: vLLM ran this package's model."""
    found = {"vllm": version("vllm"), **versions()}
    if not ours:
        del found["npu_gptoss"], found["commit"]
    return {
        "schema": SCHEMA,
        "what": what,
        "engine": f"vLLM {version('vllm')}" + (" with npu_gptoss" if ours else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": machine(torch.device("cuda")),
        "versions": found,
        "settings": settings,
        "definitions": definitions,
        "records": list(rows),
    }


def save(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=1) + "\n").encode())


class Peer:
    """vLLM's engine, driven step by step."""

    def __init__(self, args: argparse.Namespace) -> None:
        from vllm import LLM, ModelRegistry

        config = GptOssConfig.from_directory(args.model)
        self.vocabulary, self.model = config.vocab_size, model_name(config)
        options: dict[str, Any] = {
            "max_model_len": args.max_model_len,
            "gpu_memory_utilization": args.memory,
            "enable_prefix_caching": False,
            "max_num_seqs": max([128, *args.batch]),
            "max_num_batched_tokens": TOKENS_PER_STEP,
            "tensor_parallel_size": args.tp,
        }
        if args.kv_cache_dtype:
            options["kv_cache_dtype"] = args.kv_cache_dtype
        if args.moe_backend:
            options["moe_backend"] = args.moe_backend
        self.settings = {**options, "flashinfer_installed": find_spec("flashinfer") is not None}
        start = time.perf_counter()
        self.llm = LLM(model=str(args.model), skip_tokenizer_init=True, disable_log_stats=True, **options)
        self.settings["start_s"] = round(time.perf_counter() - start, 1)
        self.engine = self.llm.llm_engine
        known = ModelRegistry.models.get("GptOssForCausalLM")
        self.ours = getattr(known, "module_name", "").startswith("npu_gptoss.")
        self._numbers = iter(range(10**9))

    def add(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False, "output_kind": RequestOutputKind.DELTA}
        params = SamplingParams(max_tokens=max_tokens, **greedy)
        for prompt in prompts:
            self.engine.add_request(str(next(self._numbers)), {"prompt_token_ids": list(prompt)}, params)

    def steady_steps(self, batch: int, context: int, steps: int) -> list[float]:
        """Seconds between outputs in which every request has exactly one new token.

        Raises RuntimeError where there are not `steps` of them in a row.
        """
        prefill_steps = math.ceil(batch * context / TOKENS_PER_STEP)
        prompts = random_prompts(batch, context, self.vocabulary, 0)
        self.add(prompts, WARM_UP_STEPS + steps + 8 + batch + prefill_steps)
        ends: list[float] = []
        found: list[float] = []
        while self.engine.has_unfinished_requests():  # the last tokens are generated and thrown away
            outputs = self.engine.step()
            now = time.perf_counter()
            if not outputs or found:
                continue
            fresh = [len(output.outputs[0].token_ids) for output in outputs]
            if fresh == [1] * batch:
                ends.append(now)
            else:
                ends.clear()
            if len(ends) > WARM_UP_STEPS + steps:
                found = [later - earlier for earlier, later in pairwise(ends[WARM_UP_STEPS:])]
        if not found:
            raise RuntimeError(f"no {steps} steady steps in a row at batch {batch}, context {context}")
        return found

    def first_token(self, prompt: Sequence[int]) -> float:
        """Seconds until the idle engine returns the first token of a prompt."""
        start = end = time.perf_counter()
        self.add([prompt], 1)
        while self.engine.has_unfinished_requests():
            if self.engine.step():
                end = time.perf_counter()
        return end - start


def measure(args: argparse.Namespace) -> None:
    """Writes each file again after each point, so that an interrupted run keeps its points."""
    peer = Peer(args)
    print("started in", peer.settings["start_s"], "s", flush=True)
    settings = {**peer.settings, "steps": args.steps, "repeats": args.repeats}
    keys = {"model": peer.model, "weights": args.weights, "layout": f"tp{args.tp}"}
    records: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}

    def keep(what: str, **fields: Any) -> None:
        records[what].append({**keys, **fields})
        print(what, json.dumps(records[what][-1]), flush=True)
        save(args.out / f"{what}.json", document(what, DEFINITIONS[what], settings, records[what], ours=peer.ours))

    for tokens in args.tokens:
        prompts = random_prompts(args.repeats + 1, tokens, peer.vocabulary, 0)
        times = [peer.first_token(prompt) for prompt in prompts][1:]
        seconds = {"prefill_s": round(statistics.median(times), 5), "prefill_min_s": round(min(times), 5)}
        keep("prefill", prompt_tokens=tokens, **seconds, repeats=args.repeats)
    for context in args.context:
        for batch in args.batch:
            if batch * context > MOST_TOKENS:
                print(f"batch {batch}, context {context}: left out, more than {MOST_TOKENS} tokens", flush=True)
                continue
            times = peer.steady_steps(batch, context, args.steps)
            mean, median = (round(of(times) * 1e3, 4) for of in (statistics.fmean, statistics.median))
            keep("decode", batch=batch, context=context, tpot_ms=mean, tpot_median_ms=median, steps=len(times))
    peer.engine.engine_core.shutdown()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the checkpoint; needs no tokenizer")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the records are written")
    parser.add_argument("--weights", default="mxfp4", help="the checkpoint's format, for the records (%(default)s)")
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, nargs="*", default=[1024])
    parser.add_argument("--steps", type=int, default=128, help="decode steps that count (%(default)s)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[8192], help="lengths of prompts for prefill")
    parser.add_argument("--repeats", type=int, default=3, help="prompts of each length that count (%(default)s)")
    parser.add_argument("--max-model-len", type=int, default=131072)
    parser.add_argument("--memory", type=float, default=0.92, help="vLLM's gpu_memory_utilization (%(default)s)")
    parser.add_argument("--kv-cache-dtype", help="of vLLM's KV cache (the model's dtype)")
    parser.add_argument("--moe-backend", help="vLLM's backend for the experts (its own choice)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model (%(default)s)")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    measure(args)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without a tokenizer vLLM does not end by itself
