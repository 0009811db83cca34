"""Decode replayed as graphs against the same steps launched one by one: times and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_gptoss.bench import session
from npu_gptoss.bench.decode import random_prompts, run_decode
from npu_gptoss.bench.random_checkpoint import model_name
from npu_gptoss.bench.session import Running
from npu_gptoss.engine import SamplingParams
from npu_gptoss.errors import InputError

DEFINITIONS = {
    "graphs": "full: one graph a step; piecewise: one for what lies between two attentions, and attention launched "
    "between them",
    "tpot_ms": "as of `bench decode`, decode steps replayed as graphs; eager_tpot_ms: the same engine without graphs",
    "ratio": "eager_tpot_ms / tpot_ms",
    "tokens_identical": "greedy tokens that are the same with and without graphs, of tokens_compared, before each "
    "request first differs",
}


def measure(running: Running, batch: int, context: int, seed: int = 0) -> dict[str, Any]:
    """The record of one point. Raises InputError where the engine has no graphs."""
    engine, steps = running.engine, running.args.steps
    graphs = engine.graphs
    if graphs is None:
        raise InputError("this engine decodes without graphs: name some with --graphs")
    prompts = random_prompts(batch, context, engine.config.vocab_size, seed + 1)
    params = SamplingParams(max_tokens=min(steps, 64), ignore_eos=True)
    try:
        tokens = [result.token_ids for result in engine.generate(prompts, params)]
        with_graphs = run_decode(engine, batch, context, steps, seed)
        engine.graphs = None
        # first, because it compiles kernels of eager steps
        eager_tokens = [result.token_ids for result in engine.generate(prompts, params)]
        eager = run_decode(engine, batch, context, steps, seed)
    finally:
        engine.graphs = graphs
    return {
        "model": model_name(engine.config),
        "weights": running.form,
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


def identical(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens before the first difference."""
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


KIND = session.Kind(
    what="graphs",
    definitions=DEFINITIONS,
    head="",
    line=lambda record: ", ".join(f"{name} {value}" for name, value in record.items()),
    points=session.batches_by_contexts,
    measure=measure,
    options=("--batch", "--context", "--steps", "--share-experts", "--json"),
    defaults={"batch": [1], "steps": 64},
)
