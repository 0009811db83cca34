"""Whether this engine and another choose the same tokens from the same checkpoint, and whether graphs change any.

Two right implementations in bfloat16 part at near-ties and where rounding flips a router's choice (docs/numerics.md).
So the other engine's greedy continuation is followed token by token: at each place our own choice is compared with its
token, given everything that it had seen before. Where they differ, the distance of the two tokens in our logits, in
standard deviations of all of that place's logits, says whether it was a near-tie. The same is done with deliberate
mistakes in our engine (`mistakes.py`): agreement says something where it falls when one is made.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from npu_gptoss.bench.decode import random_prompts, run_decode, significant
from npu_gptoss.bench.mistakes import MISTAKES, mistaken
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
    "controls": "top1_agreement and mean_gap with one deliberate mistake in our engine; changed: share of places where "
    "our largest logit is another than without it, 0 where the mistake does nothing to these prompts",
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
    theirs = [token for row in rows for token in row["token_ids"]]
    ours, gaps = follow(engine, rows)
    controls = []
    for mistake in MISTAKES:
        with mistaken(engine, mistake):
            wrong, wrong_gaps = follow(engine, rows)
        control = {
            "mistake": mistake,
            "top1_agreement": share_equal(wrong, theirs),
            "mean_gap": mean(wrong_gaps),
            "changed": 1 - share_equal(wrong, ours),
        }
        controls.append({name: significant(value) for name, value in control.items()})
    params = [SamplingParams(max_tokens=len(row["token_ids"]), ignore_eos=True) for row in rows]
    results = engine.generate([row["prompt_token_ids"] for row in rows], params)
    decoded = sum(identical(result.token_ids, row["token_ids"]) for result, row in zip(results, rows, strict=True))
    record = {
        "model": model_name(engine.config),
        "weights": weights,
        "requests": len(rows),
        "tokens": len(theirs),
        "top1_agreement": share_equal(ours, theirs),
        "largest_gap": max(gaps, default=0.0),
        "mean_gap": mean(gaps),
        "decode_agreement": decoded / len(theirs),
    }
    return {name: significant(value) for name, value in record.items()} | {"controls": controls}


def follow(engine: Engine, rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Our first choice at each place of the peer's tokens, one row after the other; the gaps where it is another."""
    chosen, gaps = [], []
    for row in rows:
        prompt, theirs = row["prompt_token_ids"], row["token_ids"]
        logits = engine.logits([*prompt, *theirs[:-1]])[len(prompt) - 1 :]
        ours = logits.argmax(dim=-1).tolist()
        for place, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a != b:
                gaps.append(float((logits[place, a] - logits[place, b]) / logits[place].std()))
        chosen += ours
    return chosen, gaps


def mean(gaps: Sequence[float]) -> float:
    return statistics.fmean(gaps) if gaps else 0.0


def share_equal(first: Sequence[int], second: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(second)


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
