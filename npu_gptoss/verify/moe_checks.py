"""Routing and the routed experts: their calls in every format of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_gptoss.moe import expert_mlp, operations, prepare_experts
from npu_gptoss.moe import route as public_route
from npu_gptoss.moe.operations import EXPERTS, FEW_ROWS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.verify.calls import Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs, expert_inputs
from npu_gptoss.verify.mutations import Outputs

GPT_OSS = 2880  # its hidden and its intermediate size: as many steps in a kernel's loop as in a server


def experts_call(name: str, spec: CallSpec, generator: torch.Generator, tokens: int, **sizes: object) -> Call:
    """sizes: of `expert_inputs`."""
    inputs = expert_inputs(spec.roles["weight"], getattr(torch, spec.roles["hidden"]), generator, tokens, **sizes)
    settings = operations.described(inputs["weights"])
    return Call(name, inputs, operations.experts_call(tokens, top_k=inputs["topk_ids"].shape[1], **settings)[1])


def expert_calls(spec: CallSpec) -> Iterator[Call]:
    """Each class of batch and its edges, shares of expert parallelism, padding rows, each of gpt-oss's own sizes; then
    random shapes."""
    generator = torch.Generator().manual_seed(3)
    plans: list[tuple[str, int, dict[str, object]]] = []
    if not spec.thorough:
        plans.append(("3 tokens", 3, {}))
    else:
        plans += [(f"{tokens} tokens", tokens, {}) for tokens in (1, 2, 15, 16, 17, FEW_ROWS, FEW_ROWS + 1, 300)]
        plans += [(f"{tokens} tokens, the same experts", tokens, {"same": True}) for tokens in (1, 40, 300)]
        plans += [
            (f"{tokens} tokens, experts {first} to {last - 1} here", tokens, {"share": (first, last)})
            for tokens in (1, 33, 260)
            for first, last in ((0, 4), (2, 5), (7, 8))
        ]
        plans += [
            ("no expert of theirs here", 5, {"share": (6, 8), "same": True}),
            ("padding rows of NaN", 11, {"padding": True}),
            ("one expert a token", 9, {"top_k": 1}),
            ("90 tokens, the same 2 of 16 experts", 90, {"same": True, "experts": 16, "top_k": 2}),
            ("32 experts", 20, {"experts": 32, "inner": 64}),
        ]
        for tokens, experts in ((1, 4), (3, 4), (5, 4), (40, 4), (90, 8), (400, 3), (1600, 1)):
            shared = {"experts": experts, "top_k": min(experts, 2)}
            for name, hidden, inner in (("hidden", GPT_OSS, 128), ("intermediate", 192, GPT_OSS)):
                label = f"{tokens} tokens, {name} size {GPT_OSS}"
                plans.append((label, tokens, {**shared, "hidden": hidden, "inner": inner}))
    for name, tokens, sizes in plans:
        yield experts_call(name, spec, generator, tokens, **sizes)
    for name, draw in spec.fuzz("experts"):
        experts = draw.choice((4, 8, 16))
        first = draw.randrange(experts)
        yield experts_call(
            name,
            spec,
            torch.Generator().manual_seed(draw.getrandbits(32)),
            draw.choice((1, draw.randint(2, 64), draw.randint(2, 300))),
            experts=experts,
            hidden=32 * draw.randint(1, 5),
            inner=32 * draw.randint(1, 5),
            top_k=draw.randint(1, 4),
            share=(first, draw.randint(first + 1, experts)) if draw.random() < 0.4 else None,
            same=draw.random() < 0.2,
        )


def run_experts(inputs: Inputs, kernel: str | None) -> Outputs:
    top_k = inputs["topk_ids"].shape[1]
    prepared = prepare_experts(inputs["weights"], swiglu_limit=inputs["swiglu_limit"], top_k=top_k, kernel=kernel)
    return {"out": expert_mlp(inputs["hidden_states"], prepared, inputs["topk_weights"], inputs["topk_ids"])}


def route_calls(spec: CallSpec) -> Iterator[Call]:
    """From one to many tokens, 32 and 128 experts, as many experts as are chosen; then random ones."""
    dtype = getattr(torch, spec.roles["logits"])
    shapes = [(1, 8, 4), (3, 5, 4), (7, 4, 4), (300, 32, 4), (17, 128, 4), (5, 8, 1)] if spec.thorough else []
    named = [(f"{t} tokens, {k} of {e} experts", t, e, k, 1.0) for t, e, k in shapes]
    for name, draw in spec.fuzz("route"):
        experts = draw.choice((4, 8, 32, 128, draw.randint(4, 128)))
        named.append((name, draw.randint(1, 300), experts, draw.randint(1, 4), draw.choice((0.1, 1.0, 10.0))))
    for number, (name, tokens, experts, top_k, std) in enumerate(named):
        generator = torch.Generator().manual_seed(spec.seed * 1000 + number)
        logits = (torch.randn(tokens, experts, generator=generator) * std).to(dtype)
        yield Call(name, {"logits": logits, "top_k": top_k})


def run_route(inputs: Inputs, kernel: str | None) -> Outputs:
    """bf16 logits tie, and then either expert is right: compared are the logits that were chosen, and each once."""
    logits = inputs["logits"]
    weights, ids = public_route(logits, inputs["top_k"], kernel=kernel)
    inside = ids.long().clamp(0, logits.shape[1] - 1)
    marks = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_(1, inside, 1)
    return {
        "weights": weights,
        "logits": torch.where(inside == ids, logits.float().gather(1, inside), float("nan")),
        "distinct": marks.sum(-1),
    }


_ROUTE_PRECISIONS = {"weights": "float32", "logits": "exact", "distinct": "exact"}
_EXPERT_ROLES = {"hidden": WEIGHT_DTYPES, "weight": (*WEIGHT_DTYPES, *PACKED_FORMATS)}
CHECKS = (
    Check.of(ROUTE, route_calls, run_route, {"logits": WEIGHT_DTYPES}, _ROUTE_PRECISIONS),
    Check.of(EXPERTS, expert_calls, run_experts, _EXPERT_ROLES),
)
