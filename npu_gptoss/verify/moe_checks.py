"""Routing and the routed experts: their calls in every format of weights, and the mistakes that gpt-oss's invite."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from unittest import mock

import torch

from npu_gptoss.kernels.rows import FEW_ROWS, row_class
from npu_gptoss.moe import AnyExperts, ExpertWeights, Mxfp4Experts, expert_mlp, mxfp4, prepare_experts, quantize_fp8
from npu_gptoss.moe import route as public_route
from npu_gptoss.moe.activation import LIMIT, SWIGLUOAI
from npu_gptoss.moe.operations import EXPERTS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.verify.calls import Call, Check, Definition, Inputs, Mistake, Outputs, Wanted, widened, with_inputs

TOP_K = 4
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 96
GPT_OSS = 2880  # its hidden and its intermediate size: as many steps in a kernel's loop as in a server


def random_experts(
    weight_format: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INTERMEDIATE,
) -> AnyExperts:
    """Gate and up reach beyond the clamp of 7 for a visible share; biases are as large as the products."""

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(dtype)

    floats = ExpertWeights(
        normal(experts, hidden, 2 * inner, std=4 * hidden**-0.5),
        normal(experts, 2 * inner, std=4),
        normal(experts, inner, hidden, std=inner**-0.5),
        normal(experts, hidden),
    )
    if weight_format == "mxfp4":
        gate_up, down = (mxfp4.compress(w.mT.contiguous()) for w in (floats.gate_up_proj, floats.down_proj))
        return Mxfp4Experts(*gate_up, floats.gate_up_proj_bias, *down, floats.down_proj_bias)
    if weight_format == "float8_e4m3fn":
        return quantize_fp8(floats)
    matrices = {n: getattr(floats, n).to(getattr(torch, weight_format)) for n in ("gate_up_proj", "down_proj")}
    return dataclasses.replace(floats, **matrices)


def local_share(weights: AnyExperts, first: int, last: int) -> AnyExperts:
    """The experts [first, last) as one rank of an expert-parallel group holds them."""
    expert_map = torch.full((weights.num_experts,), -1)
    expert_map[first:last] = torch.arange(last - first)
    parts = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights) if f.name != "expert_map"}
    return dataclasses.replace(weights, **{n: t[first:last] for n, t in parts.items()}, expert_map=expert_map)


def _experts_call(
    name: str,
    wanted: Wanted,
    generator: torch.Generator,
    tokens: int,
    *,
    experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INTERMEDIATE,
    top_k: int = TOP_K,
    share: tuple[int, int] | None = None,
    same: bool = False,
    padding: bool = False,
) -> Call:
    """same: every token goes to the first experts. padding: every third token is a padding row with ids of -1."""
    dtype = getattr(torch, wanted.roles["hidden"])
    weights = random_experts(wanted.roles["weight"], dtype, generator, experts, hidden, inner)
    logits = torch.randn(tokens, experts, generator=generator)
    if same:
        logits[:, :top_k] += 50
    values, ids = logits.topk(top_k, dim=-1)
    routing = torch.softmax(values, -1)
    states = torch.randn(tokens, hidden, generator=generator).to(dtype)
    if padding:
        ids[::3], routing[::3], states[::3] = -1, 0.0, float("nan")
    inputs = {
        "hidden_states": states,
        "weights": weights if share is None else local_share(weights, *share),
        "topk_weights": routing,
        "topk_ids": ids,
        "logits": logits,
        "swiglu_limit": LIMIT,
    }
    traits = {"activation": SWIGLUOAI, "expert_parallel": share is not None, "rows": row_class(tokens)}
    return Call(name, inputs, traits)


def expert_calls(wanted: Wanted) -> Iterator[Call]:
    """Each class of batch and its edges, shares of expert parallelism, padding rows, each of gpt-oss's own sizes; then
    random shapes."""
    generator = torch.Generator().manual_seed(3)
    if not wanted.thorough:
        yield _experts_call("3 tokens", wanted, generator, 3)
    else:
        for tokens in (1, 2, 15, 16, 17, FEW_ROWS, FEW_ROWS + 1, 300):
            yield _experts_call(f"{tokens} tokens", wanted, generator, tokens)
        for tokens in (1, 40, 300):
            yield _experts_call(f"{tokens} tokens, the same experts", wanted, generator, tokens, same=True)
        for tokens in (1, 33, 260):
            for share in ((0, 4), (2, 5), (7, 8)):
                name = f"{tokens} tokens, experts {share[0]} to {share[1] - 1} here"
                yield _experts_call(name, wanted, generator, tokens, share=share)
        yield _experts_call("no expert of theirs here", wanted, generator, 5, share=(6, 8), same=True)
        yield _experts_call("padding rows of NaN", wanted, generator, 11, padding=True)
        yield _experts_call("one expert a token", wanted, generator, 9, top_k=1)
        yield _experts_call("32 experts", wanted, generator, 20, experts=32, inner=64)
        for tokens, experts in ((1, 4), (3, 4), (5, 4), (40, 4), (130, 2), (260, 2), (1600, 1)):
            for name, hidden, inner in (("hidden", GPT_OSS, 128), ("intermediate", 192, GPT_OSS)):
                name = f"{tokens} tokens, {name} size {GPT_OSS}"
                size = {"experts": experts, "hidden": hidden, "inner": inner, "top_k": min(experts, 2)}
                yield _experts_call(name, wanted, generator, tokens, **size)
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} experts")
        experts = draw.choice((4, 8, 16))
        first = draw.randrange(experts)
        yield _experts_call(
            f"fuzz {number} of seed {wanted.seed}",
            wanted,
            torch.Generator().manual_seed(draw.getrandbits(32)),
            draw.choice((1, draw.randint(2, 64), draw.randint(2, 300))),
            experts=experts,
            hidden=32 * draw.randint(1, 5),
            inner=32 * draw.randint(1, 5),
            top_k=draw.randint(1, 4),
            share=(first, draw.randint(first + 1, experts)) if draw.random() < 0.4 else None,
            same=draw.random() < 0.2,
        )


def run_experts(inputs: Inputs, kernel: str) -> Outputs:
    prepared = prepare_experts(inputs["weights"], swiglu_limit=inputs["swiglu_limit"], kernel=kernel)
    return {"out": expert_mlp(inputs["hidden_states"], prepared, inputs["topk_weights"], inputs["topk_ids"])}


def define_experts(inputs: Inputs) -> Outputs:
    return run_experts(widened(inputs), f"{EXPERTS.name}.reference")


def _weights(name: str, **changes: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """Changes of the fields that this format has; where it has none of them, the call cannot show it."""

    def change(inputs: Inputs) -> AnyExperts | None:
        weights = inputs["weights"]
        changed = {field: f(getattr(weights, field)) for field, f in changes.items() if hasattr(weights, field)}
        return dataclasses.replace(weights, **changed) if changed else None

    return with_inputs(name, weights=change)


def _columns(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], AnyExperts]:
    """On gate_up's outputs and bias: columns in floats, rows in the packed formats."""

    def changed(inputs: Inputs) -> AnyExperts:
        weights = inputs["weights"]
        fields = [f.name for f in dataclasses.fields(weights) if f.name.startswith("gate_up")]
        floats = isinstance(weights, ExpertWeights)

        def moved(name: str) -> torch.Tensor:
            tensor = getattr(weights, name)
            axis = tensor.dim() - 1 if floats else 1
            return tensor.index_select(axis, change(torch.arange(tensor.shape[axis])))

        return dataclasses.replace(weights, **{name: moved(name) for name in fields})

    return changed


def _swapped(index: torch.Tensor) -> torch.Tensor:
    return index.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _halves(index: torch.Tensor) -> torch.Tensor:
    return index.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def _within(name: str, patch: Callable[[], AbstractContextManager[object]]) -> Mistake:
    """The definition while a part of it is another."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs:
        with patch():
            return definition(inputs)

    return Mistake(name, answer)


def _silu(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.nn.functional.silu(gate_up[..., 0::2]) * gate_up[..., 1::2]


def _no_one(gate_up: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up[..., 0::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
    return up * gate * torch.sigmoid(1.702 * gate)


def _softmax_over_all(inputs: Inputs) -> torch.Tensor | None:
    if bool((inputs["topk_ids"] < 0).any()):
        return None
    return torch.softmax(inputs["logits"], -1).gather(1, inputs["topk_ids"])


def _map_ignored(inputs: Inputs) -> AnyExperts | None:
    """Global ids taken for local ones, round the number that is here."""
    weights = inputs["weights"]
    if weights.expert_map is None:
        return None
    return dataclasses.replace(weights, expert_map=torch.arange(len(weights.expert_map)) % weights.num_experts)


def _first_only(inputs: Inputs) -> torch.Tensor | None:
    top_k = inputs["topk_ids"].shape[1]
    return inputs["topk_weights"] * (torch.arange(top_k) == 0) if top_k > 1 else None


def _padding_computed(inputs: Inputs) -> torch.Tensor | None:
    return inputs["topk_ids"].clamp(min=0) if bool((inputs["topk_ids"] < 0).any()) else None


ACTIVATION, REFERENCE = "npu_gptoss.moe.activation", "npu_gptoss.moe.reference"
EXPERT_MISTAKES = (
    _weights("gate and up bias dropped", gate_up_proj_bias=torch.zeros_like),
    _weights("gate and up bias twice", gate_up_proj_bias=lambda t: 2 * t),
    _weights("down bias dropped", down_proj_bias=torch.zeros_like),
    _weights("down bias twice", down_proj_bias=lambda t: 2 * t),
    with_inputs(
        "bias of the next expert",
        weights=lambda i: (
            dataclasses.replace(i["weights"], down_proj_bias=i["weights"].down_proj_bias.roll(1, 0))
            if i["weights"].num_experts > 1
            else None
        ),
    ),
    with_inputs("gate and up swapped", weights=_columns(_swapped)),
    with_inputs("interleaved read as halves", weights=_columns(_halves)),
    with_inputs("clamp left out", swiglu_limit=lambda i: 1e9),
    _within("alpha 1.0", lambda: mock.patch(f"{ACTIVATION}.ALPHA", 1.0)),
    _within("up without one added", lambda: mock.patch(f"{REFERENCE}.swigluoai", _no_one)),
    _within("plain SwiGLU", lambda: mock.patch(f"{REFERENCE}.swigluoai", _silu)),
    with_inputs("routing weight dropped", topk_weights=lambda i: (i["topk_ids"] >= 0).float()),
    with_inputs("routing softmax over all experts", topk_weights=_softmax_over_all),
    with_inputs("only the first expert", topk_weights=_first_only),
    with_inputs("expert_map ignored", weights=_map_ignored),
    with_inputs("padding rows computed", topk_ids=_padding_computed),
    _weights("high nibble first in gate and up", gate_up_proj_blocks=lambda t: (t << 4) | (t >> 4)),
    _weights("high nibble first in down", down_proj_blocks=lambda t: (t << 4) | (t >> 4)),
    with_inputs(
        "scale exponent off by one",
        weights=lambda i: (
            dataclasses.replace(i["weights"], gate_up_proj_scales=i["weights"].gate_up_proj_scales + 1)
            if isinstance(i["weights"], Mxfp4Experts)
            else None
        ),
    ),
    _weights("scale of the next row", down_proj_scales=lambda t: t.roll(1, 1)),
)


def route_calls(wanted: Wanted) -> Iterator[Call]:
    """From one to many tokens, 32 and 128 experts, as many experts as are chosen; then random ones."""
    dtype = getattr(torch, wanted.roles["logits"])
    shapes = [(1, 8, 4), (3, 5, 4), (7, 4, 4), (300, 32, 4), (17, 128, 4), (5, 8, 1)] if wanted.thorough else []
    named = [(f"{t} tokens, {k} of {e} experts", t, e, k, 1.0) for t, e, k in shapes]
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} route")
        experts = draw.choice((4, 8, 32, 128, draw.randint(4, 128)))
        size = (draw.randint(1, 300), experts, draw.randint(1, 4), draw.choice((0.1, 1.0, 10.0)))
        named.append((f"fuzz {number} of seed {wanted.seed}", *size))
    for number, (name, tokens, experts, top_k, std) in enumerate(named):
        generator = torch.Generator().manual_seed(wanted.seed * 1000 + number)
        logits = (torch.randn(tokens, experts, generator=generator) * std).to(dtype)
        yield Call(name, {"logits": logits, "top_k": top_k})


def run_route(inputs: Inputs, kernel: str) -> Outputs:
    return chosen(inputs["logits"], *public_route(inputs["logits"], inputs["top_k"], kernel=kernel))


def chosen(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Outputs:
    """bf16 logits tie, and then either expert is right: compared are the logits that were chosen, and each once."""
    inside = ids.long().clamp(0, logits.shape[1] - 1)
    marks = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_(1, inside, 1)
    return {
        "weights": weights,
        "logits": torch.where(inside == ids, logits.float().gather(1, inside), float("nan")),
        "distinct": marks.sum(-1),
    }


def define_route(inputs: Inputs) -> Outputs:
    return run_route(inputs, f"{ROUTE.name}.reference")


def _routed(change: Callable[[Inputs, Outputs], Outputs | None]) -> Callable[[Inputs, Definition], Outputs | None]:
    return lambda inputs, definition: change(inputs, definition(inputs))


def _all_experts(inputs: Inputs, right: Outputs) -> Outputs | None:
    logits, k = inputs["logits"].float(), inputs["top_k"]
    return {**right, "weights": torch.softmax(logits, -1).topk(k).values} if k < logits.shape[1] else None


ROUTE_MISTAKES = (
    Mistake("softmax over all experts", _routed(_all_experts)),
    Mistake("weights not normalised", _routed(lambda i, right: {**right, "weights": right["logits"]})),
    Mistake(
        "all weights equal",
        _routed(
            lambda i, right: (
                {**right, "weights": torch.full_like(right["weights"], 1 / i["top_k"])} if i["top_k"] > 1 else None
            )
        ),
    ),
    with_inputs("smallest logits chosen", logits=lambda i: -i["logits"]),
    Mistake(
        "smallest of them first",
        _routed(lambda i, right: {**right, "logits": right["logits"].flip(-1)} if i["top_k"] > 1 else None),
    ),
    Mistake(
        "one expert twice",
        _routed(lambda i, right: {**right, "distinct": right["distinct"] - 1} if i["top_k"] > 1 else None),
    ),
)

CHECKS = (
    Check(
        ROUTE.name,
        ROUTE.summary,
        route_calls,
        run_route,
        define_route,
        ROUTE_MISTAKES,
        {"logits": WEIGHT_DTYPES},
        precisions={"weights": "float32", "logits": "exact", "distinct": "exact"},
        operation=ROUTE,
    ),
    Check(
        EXPERTS.name,
        EXPERTS.summary,
        expert_calls,
        run_experts,
        define_experts,
        EXPERT_MISTAKES,
        {"hidden": WEIGHT_DTYPES, "weight": (*WEIGHT_DTYPES, *PACKED_FORMATS)},
        operation=EXPERTS,
    ),
)
