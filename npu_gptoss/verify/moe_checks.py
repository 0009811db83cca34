"""Routing and the routed experts: their calls in every format of weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from npu_gptoss.model.config import packed_columns
from npu_gptoss.moe import expert_mlp, mxfp4, operations, packed, prepare_experts
from npu_gptoss.moe import route as public_route
from npu_gptoss.moe.operations import EXPERTS, FEW_ROWS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.verify.calls import OWN, Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs, bits
from npu_gptoss.verify.compare import Outputs
from npu_gptoss.verify.moe_cases import chosen, expert_inputs

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
    """Yields calls of one to many tokens, 32 and 128 experts, as many experts as are chosen; then random ones."""
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
    return chosen(inputs["logits"], *public_route(inputs["logits"], inputs["top_k"], kernel=kernel))


def expand_call(name: str, blocks: torch.Tensor, scales: torch.Tensor, experts: list[int], halves: bool) -> Call:
    """blocks, scales: of a checkpoint. The ring is full of a value that no weight has."""
    columns, depth = blocks.shape[1], blocks.shape[2] * mxfp4.GROUP
    inputs = {
        "blocks": blocks,
        "scales": scales,
        "halves": halves,
        "experts": torch.tensor(experts, dtype=torch.int32),
        "out": torch.full((len(experts), depth, columns), 1.0e30, dtype=torch.bfloat16),
    }
    return Call(name, inputs, {"quarter": packed.rows_of(columns) * columns})


def packed_calls(spec: CallSpec) -> Iterator[Call]:
    """Every code under every scale; gpt-oss's widths and its cuts' widths; untouched slots, experts twice."""
    generator = torch.Generator().manual_seed(5)
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 256, 16, 16)  # each with all bytes
    scales = torch.arange(256).clamp(max=252).to(torch.uint8)[None, :, None].expand(1, 256, 16)
    yield expand_call("every byte under every scale", every.contiguous(), scales.contiguous(), [0], False)

    def drawn(name: str, shape: tuple[int, int, int], slots: list[int], halves: bool, least: int = 0) -> Call:
        blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(least, 253, shape, generator=generator, dtype=torch.uint8)
        return expand_call(name, blocks, scales, slots, halves)

    yield drawn("gate and up of 2880", (2, 5760, 2), [1, -1, 0], True)
    yield drawn("down of 2880", (2, 2880, 3), [0, 1], False)
    for ranks in (2, 4, 8):
        columns = 2 * packed_columns(0, 2880 // ranks)
        yield drawn(f"gate and up of 2880 on {ranks} ranks", (1, columns, 1), [0], True)
    yield drawn("as many rows as a tile may have", (1, 1440, 1), [0], True)
    yield drawn("one expert in two slots, others untouched", (5, 64, 4), [-1, 3, -1, 3, 0, -1], True)
    yield drawn("nothing touched", (2, 64, 1), [-1, -1], False)
    every_third = [expert if expert % 3 == 1 else -1 for expert in range(128)]
    yield drawn("43 of 120b's 128 experts, each at its own place", (128, 64, 2), every_third, True)
    for name, draw in spec.fuzz("expand"):
        experts = draw.randint(1, 6)
        slots = [draw.randint(-1, experts - 1) for _ in range(draw.randint(1, 7))]
        shape = experts, 2 * draw.choice((16, 48, 80)), draw.randint(1, 5)
        yield drawn(name, shape, slots, draw.random() < 0.5, draw.choice((0, 100)))


def run_expand(inputs: Inputs, kernel: str | None) -> Outputs:
    weights = packed.pack(inputs["blocks"], inputs["scales"], halves=inputs["halves"])
    packed.expand(weights, inputs["experts"], inputs["out"], kernel=kernel)
    return {"bits": bits(inputs["out"])}


def define_expand(inputs: Inputs) -> Outputs:
    """Expands from the checkpoint's own layout, independent of the packing and the order of its codes."""
    whole = mxfp4.expand_transposed(inputs["blocks"], inputs["scales"])
    if inputs["halves"]:
        whole = torch.cat((whole[..., 0::2], whole[..., 1::2]), -1)
    out = inputs["out"].clone()
    for slot, expert in enumerate(inputs["experts"].tolist()):
        if expert >= 0:
            out[slot] = whole[expert]
    return {"bits": bits(out)}


_ROUTE_PRECISIONS = {"weights": OWN, "logits": "exact", "distinct": "exact"}
_EXPERT_ROLES = {"hidden": WEIGHT_DTYPES, "weight": (*WEIGHT_DTYPES, *PACKED_FORMATS)}
CHECKS = (
    Check(ROUTE, route_calls, run_route, {"logits": WEIGHT_DTYPES}, _ROUTE_PRECISIONS),
    Check(EXPERTS, expert_calls, run_experts, _EXPERT_ROLES),
    Check(packed.EXPAND, packed_calls, run_expand, {"out": ("bfloat16",)}, {"bits": "exact"}, define_expand),
)
