"""Whether this engine and another choose the same tokens from the same checkpoint, and whether graphs change any.

Two right implementations in bfloat16 part at near-ties and where rounding flips a router's choice (docs/numerics.md).
So the other engine's greedy continuation is followed token by token: at each place our own choice is compared with its
token, given everything that it had seen before. Where they differ, the distance of the two tokens in our logits, in
standard deviations of all of that place's logits, says whether it was a near-tie.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from npu_gptoss.bench.decode import random_prompts, run_decode, significant
from npu_gptoss.bench.random_checkpoint import model_name
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.errors import InputError

AGREEMENT_DEFINITIONS = {
    "top1_agreement": "share of the peer's generated tokens that are also our largest logit, given the peer's tokens "
    "before them; our logits from a prefill",
    "largest_gap": "of the tokens that differ: our largest logit less our logit of the peer's token, in standard "
    "deviations of that place's logits; mean_gap is their mean",
    "decode_agreement": "share of the peer's generated tokens that our own greedy decode, in one batch, generates at "
    "the same place before the two first differ",
}
GRAPHS_DEFINITIONS = {
    "graphs": "full: one graph a step; piecewise: one for what lies between two attentions, and attention launched "
    "between them",
    "tpot_ms": "as of `bench decode`, decode steps replayed as graphs; eager_tpot_ms: the same engine without graphs",
    "ratio": "eager_tpot_ms / tpot_ms",
    "tokens_identical": "greedy tokens that are the same with and without graphs, of tokens_compared, before each "
    "request first differs",
}


def compare(engine: Engine, rows: Sequence[dict[str, Any]], weights: str) -> dict[str, Any]:
    """rows: prompt_token_ids and token_ids of each of the peer's requests. Returns the record."""
    if not rows or any(not row.get("prompt_token_ids") or not row.get("token_ids") for row in rows):
        raise InputError("a peer's greedy tokens need prompt_token_ids and token_ids of at least one request")
    same, gaps = 0, []
    for row in rows:
        prompt, theirs = row["prompt_token_ids"], row["token_ids"]
        logits = engine.logits([*prompt, *theirs[:-1]])[len(prompt) - 1 :]
        ours = logits.argmax(dim=-1).tolist()
        same += sum(a == b for a, b in zip(ours, theirs, strict=True))
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                gaps.append(float((logits[place, a] - logits[place, b]) / logits[place].std()))
    total = sum(len(row["token_ids"]) for row in rows)
    params = [SamplingParams(max_tokens=len(row["token_ids"]), ignore_eos=True) for row in rows]
    results = engine.generate([row["prompt_token_ids"] for row in rows], params)
    decoded = sum(identical(result.token_ids, row["token_ids"]) for result, row in zip(results, rows, strict=True))
    record = {
        "model": model_name(engine.config),
        "weights": weights,
        "requests": len(rows),
        "tokens": total,
        "top1_agreement": same / total,
        "largest_gap": max(gaps, default=0.0),
        "mean_gap": statistics.fmean(gaps) if gaps else 0.0,
        "decode_agreement": decoded / total,
    }
    return {name: significant(value) for name, value in record.items()}


def compare_graphs(engine: Engine, batch: int, context: int, steps: int, weights: str, seed: int = 0) -> dict[str, Any]:
    """The engine's graphs against its eager steps: times and tokens. Returns the record."""
    graphs = engine.graphs
    if graphs is None:
        raise InputError("this engine decodes without graphs: name some with --graphs")
    prompts = random_prompts(batch, context, engine.config.vocab_size, seed + 1)
    params = SamplingParams(max_tokens=min(steps, 64), ignore_eos=True)
    try:
        tokens = [result.token_ids for result in engine.generate(prompts, params)]
        with_graphs = run_decode(engine, batch, context, steps, seed)
        engine.graphs = None
        # first, since it compiles what eager steps need
        eager_tokens = [result.token_ids for result in engine.generate(prompts, params)]
        eager = run_decode(engine, batch, context, steps, seed)
    finally:
        engine.graphs = graphs
    record = {
        "model": model_name(engine.config),
        "weights": weights,
        "graphs": graphs.mode,
        "batch": batch,
        "context": context,
        "steps": steps,
        "tpot_ms": with_graphs.mean_s * 1e3,
        "eager_tpot_ms": eager.mean_s * 1e3,
        "ratio": eager.mean_s / with_graphs.mean_s,
        "tokens_compared": sum(map(len, tokens)),
        "tokens_identical": sum(identical(a, b) for a, b in zip(tokens, eager_tokens, strict=True)),
    }
    return {name: significant(value) for name, value in record.items()}


def identical(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the first difference."""
    for place, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return place
    return min(len(first), len(second))
