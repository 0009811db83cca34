"""vLLM measured as `npu-gptoss bench` measures the offline engine: the peer beside our numbers, or our model in it.

Needs vLLM (0.25.1 and 0.33.0 were used). Of stock it needs nothing of this package, so that it can run in vLLM's own
environment; where vLLM 0.33 finds the package's plugin, our model is measured, and the files say so. Without
flashinfer, which only sampling at a temperature wants of it on this GPU, set VLLM_USE_FLASHINFER_SAMPLER=0. Run it on
the machine and the checkpoint that ours ran on, and give its files to `npu-gptoss bench … --peer`:

    python research/bench_peer_vllm.py engine --model DIR --out DIR [--batch N …] [--context N …] [--tokens N …]
    python research/bench_peer_vllm.py attention --out DIR

`engine` writes decode.json, prefill.json, greedy.json (prompts and their greedy continuations, for `bench agreement`)
and, with --profile, kernels.json (inside a decode step and a prefill) and experts.json (the experts' products in both).
`attention` times the FlashAttention-3 with sinks that vLLM's wheel carries, into attention.json.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

WARM_UP_STEPS = 4
MODELS = {(24, 32): "20b", (36, 128): "120b"}
DECODE_DEFINITIONS = {
    "tpot_ms": "mean milliseconds between consecutive outputs of the engine in which every request of the batch has "
    "exactly one new token, after four that do not count; greedy, default CUDA graphs",
    "context": "tokens of each random prompt",
}
PREFILL_DEFINITIONS = {
    "prefill_s": "median seconds from adding one random prompt to the idle engine to its first token, over `repeats` "
    "different prompts after one that does not count"
}
EXPERT_GEMM = "matmul_ogs"
EXPERTS_DEFINITIONS = {
    "us": "microseconds of one layer's two products (gate_up with the activation, down) inside a real step, from "
    "torch's profiler; routing, gathering and the weighted sum are not in it"
}
ATTENTION_DEFINITIONS = {
    "us": "median microseconds of a call in a replayed CUDA graph, over calls with tensors of their own, enough of "
    "them that none is found in the L2 cache; flash_attn_varlen_func with fa_version=3 and s_aux"
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    engine = commands.add_parser("engine", help="decode, prefill and greedy tokens of the whole engine")
    engine.add_argument("--model", type=Path, required=True, help="the checkpoint's directory; no tokenizer is needed")
    engine.add_argument("--dummy", action="store_true", help="vLLM's dummy weights: only config.json is read")
    engine.add_argument("--weights", default="mxfp4", help="what the checkpoint holds, for the records")
    engine.add_argument("--out", type=Path, required=True)
    engine.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    engine.add_argument("--context", type=int, nargs="*", default=[1024])
    engine.add_argument(
        "--most-tokens", type=int, default=300_000, help="points with more (batch x context) are left out"
    )
    engine.add_argument("--steps", type=int, default=128)
    engine.add_argument("--tokens", type=int, nargs="*", default=[8192])
    engine.add_argument("--repeats", type=int, default=3)
    engine.add_argument("--greedy", type=int, default=32, help="prompts whose greedy continuation is kept")
    engine.add_argument("--profile", action="store_true")
    engine.add_argument("--max-model-len", type=int, default=131072)
    engine.add_argument("--memory", type=float, default=0.92, help="vLLM's gpu_memory_utilization")
    engine.add_argument(
        "--kv-gib", type=float, help="size of the KV cache, where engines share a GPU (default: the rest)"
    )
    engine.add_argument(
        "--capture-sizes",
        type=int,
        nargs="+",
        help="of vLLM's graphs, for a faster start (default: its own)",
    )
    engine.add_argument("--moe-backend", help="of vLLM's experts (default: its own choice)")
    engine.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    attention = commands.add_parser("attention", help="FlashAttention-3 with sinks, alone")
    attention.add_argument("--out", type=Path, required=True)
    attention.add_argument("--batch", type=int, nargs="*", default=[1, 8, 32, 128])
    attention.add_argument("--context", type=int, nargs="*", default=[1024, 8192])
    attention.add_argument("--tokens", type=int, nargs="*", default=[8192, 32768])
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.action == "engine":
        measure_engine(args)
    else:
        measure_attention(args)


def document(
    what: str, definitions: dict[str, str], settings: dict[str, Any], rows: Sequence[Any], *, ours: bool = False
) -> dict[str, Any]:
    """The form of `npu-gptoss bench`'s files. ours: vLLM ran this package's model."""
    import torch

    own: dict[str, str] = {}
    if ours:
        from npu_gptoss.bench.provenance import versions

        found = versions()
        own = {name: found[name] for name in ("npu_gptoss", "commit")}
    return {
        "schema": 1,
        "what": what,
        "engine": f"vLLM {version('vllm')}" + (" with npu_gptoss" if ours else ""),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "machine": {"device": torch.cuda.get_device_name(), "driver": driver()},
        "versions": {
            **own,
            "vllm": version("vllm"),
            "torch": torch.__version__,
            "triton": version("triton"),
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
        "settings": settings,
        "definitions": definitions,
        "records": list(rows),
    }


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0]


def save(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def random_prompts(count: int, length: int, vocab_size: int, seed: int) -> list[list[int]]:
    draw = random.Random(f"{count}/{length}/{seed}")
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


class Peer:
    """An idle engine and what the measurements need of it."""

    def __init__(self, args: argparse.Namespace, trace_directory: str) -> None:
        from vllm import LLM, ModelRegistry

        self.config = json.loads((args.model / "config.json").read_text())
        shape = (self.config["num_hidden_layers"], self.config["num_local_experts"])
        self.model = MODELS.get(shape, f"{shape[0]}x{self.config['hidden_size']}x{shape[1]}e")
        options: dict[str, Any] = {
            "max_model_len": args.max_model_len,
            "gpu_memory_utilization": args.memory,
            "enable_prefix_caching": False,
            "max_num_seqs": max([128, *args.batch]),
            "max_num_batched_tokens": 16384,
        }
        if args.kv_gib:
            options["kv_cache_memory_bytes"] = int(args.kv_gib * 2**30)
        if args.tp > 1:
            options["tensor_parallel_size"] = args.tp
        if args.moe_backend:
            options["moe_backend"] = args.moe_backend
        if args.capture_sizes:
            options["compilation_config"] = {"cudagraph_capture_sizes": sorted({*args.capture_sizes, *args.batch})}
        self.settings = {
            **options,
            "load_format": "dummy" if args.dummy else "auto",
            # vLLM wants it for sampling at temperatures, which nothing here does (VLLM_USE_FLASHINFER_SAMPLER=0)
            "flashinfer_installed": find_spec("flashinfer") is not None,
        }
        if args.profile:
            options["profiler_config"] = {
                "profiler": "torch",
                "torch_profiler_dir": trace_directory,
                "torch_profiler_with_stack": False,
                "torch_profiler_dump_cuda_time_total": False,
            }
        start = time.perf_counter()
        self.llm = LLM(
            model=str(args.model),
            load_format=self.settings["load_format"],
            skip_tokenizer_init=True,
            disable_log_stats=True,
            **options,
        )
        self.settings["start_s"] = round(time.perf_counter() - start, 1)
        self.engine = self.llm.llm_engine
        known = ModelRegistry.models.get("GptOssForCausalLM")
        self.ours = getattr(known, "module_name", "").startswith("npu_gptoss.")
        self._numbers = iter(range(10**9))

    def document(self, what: str, definitions: dict[str, str], settings: dict[str, Any], rows: Sequence[Any]) -> Any:
        return document(what, definitions, settings, rows, ours=self.ours)

    def add(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[str]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        return [
            self.engine.add_request(str(next(self._numbers)), {"prompt_token_ids": list(prompt)}, params)
            for prompt in prompts
        ]

    def steady_steps(self, batch: int, context: int, steps: int, *, profile: bool = False) -> list[float]:
        """Seconds between outputs in which every request has exactly one new token.

        profile: those steps, and no prompt's, go into a trace.
        """
        prompts = random_prompts(batch, context, self.config["vocab_size"], 0)
        self.add(prompts, WARM_UP_STEPS + steps + 8 + batch + math.ceil(batch * context / 16384))
        ends: list[float] = []
        found: list[float] = []
        while self.engine.has_unfinished_requests():  # the last tokens are generated and thrown away
            outputs = self.engine.step()
            now = time.perf_counter()
            fresh = [len(output.outputs[0].token_ids) for output in outputs]
            if not outputs or found:
                continue
            if len(fresh) == batch and all(count == 1 for count in fresh):
                ends.append(now)
            else:
                ends.clear()
            if profile and len(ends) == WARM_UP_STEPS:
                self.llm.start_profile()
            if len(ends) > WARM_UP_STEPS + steps:
                if profile:
                    self.llm.stop_profile()  # returns when the trace is written
                counted = ends[WARM_UP_STEPS:]
                found = [later - earlier for earlier, later in pairwise(counted)]
        if not found:
            raise RuntimeError(f"no {steps} steady steps in a row at batch {batch}, context {context}")
        return found

    def first_token(self, prompt: Sequence[int]) -> float:
        start = time.perf_counter()
        self.add([prompt], 1)
        end = start
        while self.engine.has_unfinished_requests():
            if self.engine.step():
                end = time.perf_counter()
        return end - start


def measure_engine(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as traces:
        peer = Peer(args, traces)
        print("started in", peer.settings["start_s"], "s", flush=True)
        settings = {**peer.settings, "steps": args.steps, "repeats": args.repeats}
        keys = {"model": peer.model, "weights": args.weights, "layout": f"tp{args.tp}"}
        if args.tokens:
            rows = []
            for tokens in args.tokens:
                prompts = random_prompts(args.repeats + 1, tokens, peer.config["vocab_size"], 0)
                times = [peer.first_token(prompt) for prompt in prompts][1:]
                rows.append(
                    {
                        **keys,
                        "prompt_tokens": tokens,
                        "prefill_s": round(statistics.median(times), 5),
                        "prefill_min_s": round(min(times), 5),
                        "repeats": args.repeats,
                    }
                )
                print("prefill", json.dumps(rows[-1]), flush=True)
                save(args.out / "prefill.json", peer.document("prefill", PREFILL_DEFINITIONS, settings, rows))
        rows = []
        for context in args.context:
            for batch in args.batch:
                if batch * context > args.most_tokens:
                    more = f"more tokens than --most-tokens {args.most_tokens}"
                    print(f"batch {batch}, context {context}: left out, {more}", flush=True)
                    continue
                times = peer.steady_steps(batch, context, args.steps)
                rows.append(
                    {
                        **keys,
                        "batch": batch,
                        "context": context,
                        "tpot_ms": round(statistics.fmean(times) * 1e3, 4),
                        "tpot_median_ms": round(statistics.median(times) * 1e3, 4),
                        "steps": len(times),
                    }
                )
                print("decode", json.dumps(rows[-1]), flush=True)
                save(args.out / "decode.json", peer.document("decode", DECODE_DEFINITIONS, settings, rows))
        if args.greedy:
            keep_greedy(peer, args)
        if args.profile:
            keep_profile(peer, args, Path(traces))
        peer.llm.llm_engine.engine_core.shutdown()


def keep_greedy(peer: Peer, args: argparse.Namespace, length: int = 128, tokens: int = 32) -> None:
    """Prompts with the tokens that the engine continues them by, all of them in one batch."""
    prompts = random_prompts(args.greedy, length, peer.config["vocab_size"], 7)
    names = peer.add(prompts, tokens)
    generated: dict[str, list[int]] = defaultdict(list)
    while peer.engine.has_unfinished_requests():
        for output in peer.engine.step():
            generated[output.request_id] += list(output.outputs[0].token_ids)
    rows = [
        {"prompt_token_ids": prompt, "token_ids": generated[name if name in generated else name.split("-")[0]]}
        for name, prompt in zip(names, prompts, strict=True)
    ]
    assert all(len(row["token_ids"]) == tokens for row in rows), "not every request got its tokens"
    save(args.out / "greedy.json", peer.document("greedy", {"token_ids": "greedy continuation"}, peer.settings, rows))


def keep_profile(peer: Peer, args: argparse.Namespace, traces: Path) -> None:
    """The device's kernels inside decode steps of 32 requests and inside one prefill of 8 192 tokens."""
    found = {}
    peer.steady_steps(32, 1024, 8, profile=True)
    seen = set(traces.rglob("*"))
    found["decode_b32"] = kernels_of(seen)
    prompt = random_prompts(1, 8192, peer.config["vocab_size"], 5)[0]
    peer.first_token(prompt)
    peer.llm.start_profile()
    peer.first_token(prompt)
    peer.llm.stop_profile()
    found["prefill_8192"] = kernels_of(set(traces.rglob("*")) - seen)
    save(args.out / "kernels.json", peer.document("profile", {"us": "of one call"}, peer.settings, [found]))
    experts = f"{args.weights} of {peer.config['num_local_experts']} tokens="
    rows = [
        {"operation": "moe.experts", "kernel": EXPERT_GEMM, "case": f"{experts}{tokens}", "us": us}
        for name, tokens in (("decode_b32", 32), ("prefill_8192", 8192))
        if (us := experts_us(found[name])) is not None
    ]
    save(args.out / "experts.json", peer.document("kernel", EXPERTS_DEFINITIONS, peer.settings, rows))
    for name, kernels in found.items():
        print(name)
        for kernel in kernels[:16]:
            print(
                f"  {kernel['total_us']:>10.1f} us {kernel['calls']:>6} x {kernel['us']:>9.2f}  {kernel['name'][:100]}"
            )


def experts_us(kernels: list[dict[str, Any]]) -> float | None:
    """Of one layer: its two products. None where vLLM has chosen other kernels."""
    products = [kernel for kernel in kernels if EXPERT_GEMM in kernel["name"]]
    calls = sum(kernel["calls"] for kernel in products)
    return round(2 * sum(kernel["total_us"] for kernel in products) / calls, 2) if calls else None


def kernels_of(files: Iterable[Path]) -> list[dict[str, Any]]:
    """From the trace files among `files`: every kernel with its calls and times, longest first."""
    calls: dict[str, list[float]] = defaultdict(list)
    for file in files:
        opener = gzip.open if file.suffix == ".gz" else open
        try:
            with opener(file, "rt", encoding="utf-8") as stream:
                events = json.load(stream)["traceEvents"]
        except (OSError, ValueError, KeyError):
            continue  # a folder, or a table of totals beside the trace
        for event in events:
            if event.get("cat") == "kernel":
                calls[event["name"]].append(float(event["dur"]))
    rows = [
        {"name": key[:160], "calls": len(d), "us": round(statistics.fmean(d), 3), "total_us": round(sum(d), 1)}
        for key, d in calls.items()
    ]
    return sorted(rows, key=lambda row: -row["total_us"])


def measure_attention(args: argparse.Namespace) -> None:
    import torch
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    heads, kv_heads, size, window = 64, 8, 64, 128
    place = {"device": "cuda", "dtype": torch.bfloat16}
    whole = {"device": "cuda", "dtype": torch.int32}
    cold = 3 * torch.cuda.get_device_properties(0).L2_cache_size
    sinks = torch.randn(heads, **place)
    rows: list[dict[str, Any]] = []

    def keep(case: str, calls: list[Callable[[], Any]], moved: float, flops: float) -> None:
        seconds = graph_time(calls)
        rows.append(
            {
                "operation": "attention.paged",
                "kernel": "FlashAttention-3 of vLLM's wheel",
                "case": case,
                "us": round(seconds * 1e6, 3),
                "TBps": round(moved / seconds / 1e12, 4),
                "TFLOPs": round(flops / seconds / 1e12, 2),
            }
        )
        print(json.dumps(rows[-1]), flush=True)

    for kind, span in (("full", (-1, -1)), ("window", (window - 1, 0))):
        for context in args.context:
            for batch in args.batch:
                keys = batch * (context if kind == "full" else min(context, window))
                moved, blocks = keys * kv_heads * size * 4, math.ceil(context / 16)
                sets = max(1, min(64, int(cold // moved) + 1))
                cache = [torch.randn(sets * batch * blocks, 16, kv_heads, size, **place) for _ in range(2)]
                tables = torch.randperm(sets * batch * blocks, device="cuda").int().view(sets, batch, blocks)
                shared = {
                    "max_seqlen_q": 1,
                    "cu_seqlens_q": torch.arange(batch + 1, **whole),
                    "max_seqlen_k": context,
                    "seqused_k": torch.full((batch,), context, **whole),
                    "causal": True,
                    "window_size": list(span),
                    "s_aux": sinks,
                    "fa_version": 3,
                }
                query = torch.randn(batch, heads, size, **place)
                calls = [
                    lambda t=t, q=query, c=cache, s=shared: flash_attn_varlen_func(q, *c, block_table=t, **s)
                    for t in tables
                ]
                keep(f"decode {kind} ctx={context} B={batch}", calls, moved, keys * heads * size * 4)
        for tokens in args.tokens:
            query = torch.randn(tokens, heads, size, **place)
            key, value = (torch.randn(tokens, kv_heads, size, **place) for _ in range(2))
            ends = torch.tensor([0, tokens], **whole)
            pairs = tokens * tokens / 2 if kind == "full" else tokens * window
            shared = {
                "max_seqlen_q": tokens,
                "cu_seqlens_q": ends,
                "max_seqlen_k": tokens,
                "cu_seqlens_k": ends,
                "causal": True,
                "window_size": list(span),
                "s_aux": sinks,
                "fa_version": 3,
            }
            call = [lambda q=query, k=key, v=value, s=shared: flash_attn_varlen_func(q, k, v, **s)]
            keep(f"prefill {kind} {tokens}", call, tokens * size * 4 * (heads + kv_heads), pairs * heads * size * 4)
    save(args.out / "attention.json", document("kernel", ATTENTION_DEFINITIONS, {}, rows))


def graph_time(calls: list[Callable[[], Any]], samples: int = 20) -> float:
    """Median seconds of one call, from replays of a graph of all of them."""
    import torch

    for _ in range(3):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(samples + 1):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # without a tokenizer vLLM does not end by itself
