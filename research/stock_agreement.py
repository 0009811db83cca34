"""Whether our model inside vLLM chooses the tokens that stock vLLM chooses, and how often stock agrees with itself.

    python research/agreement.py checkpoint CALM --size 20b --layers 4
    python research/stock_agreement.py --model CALM --out FILE

Needs vLLM 0.33 and a GPU. Stock gpt-oss has more than one backend for its experts, all of them right, so its agreement
with itself over two is what a right engine can reach (`agreement.py` says why it is not all). Each engine generates
greedy tokens; then each computes the prompts with the tokens of each, and it is told at how many places a token of the
other is its own choice. Deliberate mistakes in our model say what that number is worth. The engines start together.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from npu_gptoss.bench.decode import random_prompts
from npu_gptoss.bench.graphs import identical
from npu_gptoss.engine import Engine
from npu_gptoss.model.config import GptOssConfig
from research.agreement import MISTAKES, RAMP, with_mistake
from research.children import Child, inside

OURS, STOCK = "ours", ("stock, triton", "stock, marlin")
OPTIONS: dict[str, dict[str, Any]] = {OURS: {}} | {name: {"moe_backend": name.split()[-1]} for name in STOCK}
EXACT, OFFLINE = "offline engine, float32", "offline engine, bfloat16"
REQUESTS, PROMPT, TOKENS = 40, 128, 64  # all of them with their tokens fit into one step, which no graph is for
WITH_LOGITS = 8  # prompts
START_SECONDS, ORDER_SECONDS = 240, 60
DEFINITIONS = {
    "same": "share of the followed engine's greedy tokens that no other token beats in the logits of this engine, "
    "given the tokens before; computed as prompts",
    "mean_gap": "where another token does: by how much, in log-probability",
    "decoded": "share of the greedy tokens of two engines that come before the two first differ",
    "logits": "of two engines, after a prompt: root mean square of their difference over the deviation of the second's "
    f"logits, mean over {WITH_LOGITS} prompts. Beside {EXACT}: what rounding to bfloat16 does",
}

Rows = list[dict[str, list[int]]]  # prompt_token_ids and token_ids of each request


def matched(gaps: Sequence[float]) -> dict[str, float]:
    """gaps: of each place, 0 where the token is this engine's choice."""
    apart = [gap for gap in gaps if gap > 0]
    return {
        "same": round(1 - len(apart) / len(gaps), 4),
        "mean_gap": round(sum(apart) / len(apart), 4) if apart else 0.0,
    }


def decoded(first: Rows, second: Rows) -> float:
    same = sum(identical(a["token_ids"], b["token_ids"]) for a, b in zip(first, second, strict=True))
    return round(same / sum(len(row["token_ids"]) for row in second), 4)


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """Both [prompts, vocabulary] float32."""
    rms = (first - second).square().mean(dim=-1).sqrt()
    return round(float((rms / second.std(dim=-1)).mean()), 5)


def conclusion(record: Mapping[str, Any]) -> str:
    """In one sentence. Of the mistakes all but YaRN's ramp, which prompts as short as these hardly show."""
    same = {(row["engine"], row["follows"]): row["same"] for row in record["followed"]}
    itself = [same[pair] for pair in product(STOCK, STOCK) if pair[0] != pair[1] and pair in same]
    ours = [same[OURS, name] for name in STOCK if (OURS, name) in same]
    if not itself or not ours:
        return "an engine is missing: nothing to conclude"
    verdict = "at least" if min(ours) >= min(itself) else "LESS than"
    wrong = max(row["same"] for row in record["mistakes"] if row["mistake"] != RAMP)
    return (
        f"ours agrees with stock in {min(ours):.4f} of the tokens, {verdict} the {min(itself):.4f} of stock with "
        f"itself; with a mistake in {wrong:.4f} at most"
    )


def compare(
    children: Mapping[str, Child], prompts: list[list[int]], offline: Mapping[str, torch.Tensor], folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """The record. children: ready engines by name; offline: logits of the first prompts, by name."""
    greedy: dict[str, Rows] = {}
    logits = dict(offline)
    for name, child in children.items():
        tokens = child.ask({"do": "generate", "prompts": prompts, "count": TOKENS}, ORDER_SECONDS)
        greedy[name] = [{"prompt_token_ids": ids, "token_ids": more} for ids, more in zip(prompts, tokens, strict=True)]
        child.ask({"do": "logits", "prompts": prompts[:WITH_LOGITS], "path": str(folder / name)}, ORDER_SECONDS)
        logits[name] = torch.load(folder / name)
    record: dict[str, list[dict[str, Any]]] = {"followed": [], "mistakes": [], "decoded": [], "logits": []}

    def keep(kind: str, **row: Any) -> None:
        record[kind].append(row)
        print(kind, json.dumps(row), flush=True)

    for name, other in product(children, greedy):
        gaps = children[name].ask({"do": "follow", "rows": greedy[other]}, ORDER_SECONDS)
        keep("followed", engine=name, follows=other, **matched(gaps))
    if OURS in children:
        other = next((name for name in greedy if name != OURS), OURS)
        for mistake in MISTAKES:
            children[OURS].ask({"do": "mistake", "name": mistake}, ORDER_SECONDS)
            gaps = children[OURS].ask({"do": "follow", "rows": greedy[other]}, ORDER_SECONDS)
            keep("mistakes", mistake=mistake, follows=other, **matched(gaps))
    names = list(greedy)
    for first, second in ((a, b) for i, a in enumerate(names) for b in names[i + 1 :]):
        keep("decoded", engines=[first, second], share=decoded(greedy[first], greedy[second]))
    for first, second in ((a, b) for i, a in enumerate(list(logits)) for b in list(logits)[:i]):
        keep("logits", engines=[first, second], distance=distance(logits[first], logits[second]))
    return record


def offline_logits(model: Path, prompts: Sequence[Sequence[int]], device: str) -> dict[str, torch.Tensor]:
    found = {}
    for name in (EXACT, OFFLINE):
        engine = Engine(model, device=device, dtype=name.split()[-1], num_blocks=200, graphs="none")
        found[name] = torch.stack([engine.logits(prompt)[-1] for prompt in prompts]).float().cpu()
        del engine
    return found


def start(name: str, model: Path, folder: Path) -> Child:
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | ({} if name == OURS else {"NPU_GPTOSS": "0"})
    child = Child(name, [sys.executable, __file__, "--child"], folder / f"{name}.log", environment)
    child.tell({"model": str(model), "options": OPTIONS[name]})
    return child


# -- in a child


def child() -> None:
    hear, say = inside()
    settings = hear()
    from vllm import LLM

    llm = LLM(
        settings["model"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.1,
        kv_cache_memory_bytes=2 << 30,
        max_model_len=1024,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=8192,
        compilation_config={"cudagraph_capture_sizes": [1, REQUESTS]},
        **settings["options"],
    )
    say("ready")
    orders: dict[str, Callable[..., Any]] = {
        "generate": generate,
        "follow": follow,
        "logits": save_logits,
        "mistake": make_mistake,
    }
    while True:
        order = hear()
        say(orders[order.pop("do")](llm, **order))


def generate(llm: Any, prompts: Sequence[list[int]], count: int, **more: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in _asked(llm, prompts, count)]


def follow(llm: Any, rows: Rows) -> list[float]:
    """By how much the best token beats the row's, at each place, in log-probability."""
    outputs = _asked(llm, [row["prompt_token_ids"] + row["token_ids"] for row in rows], 1, prompt_logprobs=1)
    gaps = []
    for row, output in zip(rows, outputs, strict=True):
        for place, token in enumerate(row["token_ids"], start=len(row["prompt_token_ids"])):
            here = output.prompt_logprobs[place]
            gaps.append(max(entry.logprob for entry in here.values()) - here[token].logprob)
    return gaps


def save_logits(llm: Any, prompts: Sequence[list[int]], path: str) -> None:
    """After the last token of each prompt, [prompts, vocabulary] float32."""
    kept: list[torch.Tensor] = []

    def keep(model: Any) -> None:
        compute = model.compute_logits
        model.compute_logits = lambda *inputs: kept.append(compute(*inputs)) or kept[-1]

    llm.apply_model(keep)
    found = []
    for prompt in prompts:
        kept.clear()
        _asked(llm, [prompt], 1)
        found.append(kept[-1][-1].float().cpu())
    llm.apply_model(lambda model: model.__dict__.pop("compute_logits"))
    torch.save(torch.stack(found), path)


def make_mistake(llm: Any, name: str) -> None:
    """In our model, in place of the last one. Prompts of one step reach no graph, so they are computed with it."""

    def change(model: Any) -> None:
        right = model.__dict__.setdefault("right", model.gptoss)
        model.gptoss = with_mistake(right, name)

    llm.apply_model(change)


def _asked(llm: Any, prompts: Sequence[list[int]], count: int, **more: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, **more)
    return llm.generate([{"prompt_token_ids": list(ids)} for ids in prompts], params, use_tqdm=False)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="calm weights in MXFP4")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", default="cuda", help="of the offline engine")
    args = parser.parse_args(arguments)
    print(json.dumps(DEFINITIONS, indent=1), flush=True)
    config = GptOssConfig.from_directory(args.model)
    prompts = random_prompts(REQUESTS, PROMPT, config.vocab_size, 7)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started = {name: start(name, args.model, folder) for name in OPTIONS}
        try:
            offline = offline_logits(args.model, prompts[:WITH_LOGITS], args.device)
            ready = {}
            for name, one in started.items():
                try:
                    one.hear(START_SECONDS)
                    ready[name] = one
                except RuntimeError as error:  # the others are worth comparing
                    print(error, file=sys.stderr, flush=True)
            record = compare(ready, prompts, offline, folder)
        finally:
            for one in started.values():
                one.end()
    print(conclusion(record))
    content = {"model": args.model.name, "definitions": DEFINITIONS, "conclusion": conclusion(record)} | record
    args.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--child"]:
        child()
    sys.exit(main())
