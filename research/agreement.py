"""Whether another engine chooses the same tokens from the same weights.

    python research/agreement.py checkpoint DIR --size 20b
    python research/bench_peer_vllm.py engine --model DIR --out OUT --batch 1 --tokens 8192
    python research/agreement.py compare --model DIR --peer OUT/greedy.json --json FILE

`stock_agreement.py` asks the same of our model inside vLLM.

Two right implementations in bfloat16 part at near-ties and where rounding flips a router's choice (docs/numerics.md).
So the other engine's greedy tokens are followed one by one: at each place our own choice is compared with its token,
given everything that it had seen before. Where they differ, the distance of the two tokens in our logits, in standard
deviations of that place's logits, says whether it was a near-tie. The same is done with deliberate mistakes in our
engine: agreement says something where it falls when one is made.

Random weights of the published initializer amplify any rounding over 24 layers until two engines share a third of
their choices. `checkpoint` writes calm ones: a layer adds little to what passes through it, and what it adds depends on
sinks, on the window's last key, on biases and on the clamp (docs/benchmarks/README.md, docs/decisions.md).
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from npu_gptoss.bench import records, session
from npu_gptoss.bench.graphs import identical
from npu_gptoss.bench.random_checkpoint import SHAPES, full_config, model_name, random_tensors
from npu_gptoss.dense.rotary import apply_rotary
from npu_gptoss.engine import Engine, SamplingParams
from npu_gptoss.engine.device import resolve_device
from npu_gptoss.errors import InputError
from npu_gptoss.model.checkpoint import write_checkpoint
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.model.rope import cos_sin_cache, yarn_inv_freq
from npu_gptoss.model.transformer import GptOss
from npu_gptoss.model.weights import Layer

DEFINITIONS = {
    "top1_agreement": "share of the peer's generated tokens that are also our largest logit, given the peer's tokens "
    "before them; our logits from a prefill",
    "largest_gap": "of the tokens that differ: our largest logit less our logit of the peer's token, in standard "
    "deviations of that place's logits; mean_gap is their mean",
    "decode_agreement": "share of the peer's generated tokens that our own greedy decode, in one batch, generates at "
    "the same place before the two first differ",
    "controls": "top1_agreement and mean_gap with one deliberate mistake in our engine; changed: share of places where "
    "our largest logit is another than without it, 0 where the mistake does nothing to these prompts",
}
NEVER = -1e4  # a sink's logit: its weight is zero beside any key's, and no kernel's arithmetic sees an infinity
NO_LIMIT = 1e9


def calm_deviations(config: GptOssConfig) -> dict[str, float]:
    """Standard deviations by the end of a tensor's name; all others are the published initializer's.

    A projection of n inputs and deviation g / sqrt(n) multiplies the deviation of normed inputs by g. Chosen on the CPU
    at 512 channels, 24 layers and 32 experts, in fp32 against bf16 and against mistakes:

    * output 0.32, down 2 ** -7: each layer adds about a tenth of the residual stream's deviation. What it does to an
      error is then added to the error, rather than put in its place; 48 roundings of the stream itself remain.
    * query and key 0.25, on biases that look back: where attention looks hardly depends on what rounding has changed.
    * router and its biases 4: the fourth expert has so little weight that the fifth in its place changes little.
    * gate and up 4, their biases 1: 5 and 10 % of them are clamped at 7, and the biases matter beside them.
    """
    hidden = config.hidden_size**-0.5
    return {
        "q_proj.weight": 0.25 * hidden,
        "k_proj.weight": 0.25 * hidden,
        "v_proj.weight": hidden,
        "v_proj.bias": 0.1,
        "o_proj.weight": 0.32 * (config.num_attention_heads * config.head_dim) ** -0.5,
        "router.weight": 4 * hidden,
        "router.bias": 4.0,
        "gate_up_proj": 4 * hidden,
        "gate_up_proj_bias": 1.0,
        "down_proj": 2**-7 * config.intermediate_size**-0.5,
    }


def calm_tensors(config: GptOssConfig, seed: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Sinks are about the score of a key that is looked for: they weigh in every head, and are all where none is."""
    generator = torch.Generator(device=device).manual_seed(seed)
    sink = config.head_dim**0.5 * yarn_inv_freq(config)[1] ** 2
    for name, tensor in random_tensors(config, seed, device, calm_deviations(config)):
        if name.endswith("q_proj.bias"):
            layer = int(name.split(".")[2])
            tensor, keys = look_back_biases(config, config.window(layer), generator, device)
        elif name.endswith("k_proj.bias"):
            tensor = keys
        elif name.endswith("sinks"):
            tensor = tensor + sink
        yield name, tensor


def look_back_biases(
    config: GptOssConfig, window: int | None, generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Biases of one layer's queries [heads * head_dim] and keys [kv_heads * head_dim] with which a head looks back.

    A head's query bias is its key bias turned back by some positions, and rotary embedding turns it on: the two meet
    where the key is that many positions earlier. Of a window layer, every other head looks for the oldest key that it
    may see, so that half of them miss it in a window of one less and find another in one of one more; all other heads
    look back by a drawn number of positions, below the width of the model's windows.
    """
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    keys = torch.randn((kv_heads, dim), generator=generator, device=device)
    back = torch.randint(0, config.sliding_window, (heads,), generator=generator, device=device)
    if window is not None:
        back[::2] = window - 1
    angles = -back[:, None] * yarn_inv_freq(config)[0].to(device)
    queries = apply_rotary(keys.repeat_interleave(heads // kv_heads, 0)[:, None], angles.cos(), angles.sin())
    return queries.flatten().bfloat16(), keys.flatten().bfloat16()


def _window(step: int) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        window = layer.attention.window
        return layer if window is None else replace(layer, attention=replace(layer.attention, window=window + step))

    return change


_OF_LAYERS: dict[str, Callable[[Layer], Layer]] = {
    "sinks dropped": lambda layer: replace(
        layer, attention=replace(layer.attention, sinks=torch.full_like(layer.attention.sinks, NEVER))
    ),
    "window one key less": _window(-1),
    "window one key more": _window(+1),
    "clamp left out": lambda layer: replace(
        layer, moe=replace(layer.moe, experts=replace(layer.moe.experts, swiglu_limit=NO_LIMIT))
    ),
    "attention's biases dropped": lambda layer: replace(
        layer,
        attention=replace(
            layer.attention,
            qkv_bias=torch.zeros_like(layer.attention.qkv_bias),
            output_bias=torch.zeros_like(layer.attention.output_bias),
        ),
    ),
    "router's bias dropped": lambda layer: replace(
        layer, moe=replace(layer.moe, router_bias=torch.zeros_like(layer.moe.router_bias))
    ),
}
RAMP = "YaRN's ramp rounded"
MISTAKES = (*_OF_LAYERS, RAMP)


@contextmanager
def mistaken(engine: Engine, mistake: str) -> Iterator[None]:
    """Inside, the engine computes prompts with the mistake; graphs hold what they were captured with."""
    right = engine.model
    engine.model = with_mistake(right, mistake)
    try:
        yield
    finally:
        engine.model = right


def with_mistake(model: GptOss, mistake: str) -> GptOss:
    """A copy that shares all that is right with the model."""
    wrong = copy.copy(model)
    if mistake == RAMP:
        config = model.config
        config = replace(config, rope_scaling=replace(config.rope_scaling, truncate=not config.rope_scaling.truncate))
        wrong.cos_sin = cos_sin_cache(config, len(model.cos_sin), model.cos_sin.dtype, model.cos_sin.device)
    else:
        wrong.layers = tuple(map(_OF_LAYERS[mistake], model.layers))
    return wrong


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
            "mean_gap": statistics.fmean(wrong_gaps or [0.0]),
            "changed": 1 - share_equal(wrong, ours),
        }
        controls.append({name: session.significant(value) for name, value in control.items()})
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
        "mean_gap": statistics.fmean(gaps or [0.0]),
        "decode_agreement": decoded / len(theirs),
    }
    return {name: session.significant(value) for name, value in record.items()} | {"controls": controls}


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


def share_equal(first: Sequence[int], second: Sequence[int]) -> float:
    return sum(a == b for a, b in zip(first, second, strict=True)) / len(second)


def write_calm(args: argparse.Namespace) -> int:
    config, device = full_config(args.size), resolve_device(args.device)
    if args.layers is not None:
        config = replace(config, num_hidden_layers=args.layers, layer_types=config.layer_types[: args.layers])
    write_checkpoint(args.directory, config, calm_tensors(config, args.seed, device))
    return 0


def compare_command(args: argparse.Namespace) -> int:
    peer = records.read_peer(args.peer, "greedy", needed=("prompt_token_ids", "token_ids"))
    with session.running_engine(args, [len(peer["records"])]) as running:
        record = compare(running.engine, peer["records"], running.form)
        record["peer"] = {"engine": peer["engine"]}
        print(", ".join(f"{name} {value}" for name, value in record.items() if name != "controls"))
        for control in record["controls"]:
            print("with a mistake: " + ", ".join(f"{name} {value}" for name, value in control.items()))
        kept = session.Records(args, "agreement", DEFINITIONS, running.device, running.ceilings)
        kept.add(record)
        kept.finish()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="action", required=True)
    of_weights = commands.add_parser("checkpoint", help="write calm weights of full size, without a tokenizer")
    of_weights.add_argument("directory", type=Path, metavar="DIR", help="where to write; must hold no weights")
    of_weights.add_argument("--size", choices=SHAPES, default="20b")
    of_weights.add_argument("--layers", type=session.count, metavar="N", help="only the first ones")
    of_weights.add_argument("--seed", type=int, default=0)
    of_weights.add_argument("--device", default="auto", metavar="auto|cpu|cuda", help="where the numbers are drawn")
    of_tokens = commands.add_parser("compare", help="our tokens against another engine's on the same checkpoint")
    session.engine_arguments(of_tokens, "--share-experts", "--json")
    of_tokens.add_argument("--peer", type=Path, required=True, metavar="FILE", help="the other's prompts and tokens")
    args = parser.parse_args(arguments)
    return write_calm(args) if args.action == "checkpoint" else compare_command(args)


if __name__ == "__main__":
    sys.exit(main())
