"""Norms, projections, RoPE, router and logits: their calls, and the mistakes of a layer's small operations."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from npu_gptoss.attention import AttentionMetadata
from npu_gptoss.dense import Weight, add_norm, greedy, logits, output, qkv, quantize_rows, router
from npu_gptoss.dense.operations import ADD_NORM, FLOATS, FP8, GREEDY, LOGITS, OUTPUT, QKV, ROUTER
from npu_gptoss.kernels import Operation
from npu_gptoss.kernels.rows import FEW_ROWS, row_class
from npu_gptoss.verify.calls import Call, Check, Inputs, Mistake, Outputs, Wanted, widened, with_inputs

EPS = 1e-5
BLOCKS, BLOCK_SIZE, UNTOUCHED = 80, 4, 7.0
HEAD_DIMS = (64, 16, 128, 32)
BOTH = (True, False)
ROWS = (1, 2, 3, 17, FEW_ROWS, FEW_ROWS + 1)
LARGE_ROWS = (1, 20, 140)
# gpt-oss's own sizes, apart, so that matrices stay small
WIDE, MANY_HEADS = {"hidden": 2880, "experts": 32}, {"heads": 64, "kv_heads": 8}


@dataclass(frozen=True)
class Sizes:
    """hidden is no multiple of a block; experts no multiple of a share."""

    hidden: int = 112
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    experts: int = 8
    top_k: int = 4
    vocab: int = 300


@dataclass(frozen=True)
class Maker:
    """Random tensors of one call, float32 drawn and then rounded to the role's dtype."""

    generator: torch.Generator
    roles: Mapping[str, str]

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0, role: str = "hidden") -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator) * std + mean
        return drawn.to(getattr(torch, self.roles[role]))

    def matrix(self, out: int, inputs: int) -> Weight:
        """Rows of very different sizes in eight bits, so that a row's scale counts."""
        drawn = torch.randn(out, inputs, generator=self.generator) * inputs**-0.5
        if self.roles["weight"] == FP8:
            return quantize_rows(drawn * torch.logspace(-1, 0.5, out)[:, None])
        return drawn.to(getattr(torch, self.roles["weight"]))

    def norm(self, hidden: int) -> torch.Tensor:
        return torch.randn(hidden, generator=self.generator) * 0.3 + 1.0


def _calls(
    wanted: Wanted,
    tag: str,
    make: Callable[[Maker, int, Sizes, bool], Inputs],
    traits: Callable[[int, Sizes], dict],
    large: Sequence[Mapping[str, int]],
) -> Iterator[Call]:
    """Each class of rows and its edges with and without delta; each head size; large sizes; then random ones."""
    dims = wanted.values("head_dim", HEAD_DIMS)
    plans: list[tuple[str, int, Sizes, bool]] = []
    usual = Sizes(head_dim=16 if 16 in dims else dims[0])
    for rows in ROWS if wanted.thorough else (1, 3):
        plans += [(f"{rows} row{'s'[: rows - 1]}, {'sum' if delta else 'plain'}", rows, usual, delta) for delta in BOTH]
    if wanted.thorough:
        plans += [(f"3 rows, heads of {dim}", 3, dataclasses.replace(usual, head_dim=dim), True) for dim in dims]
        plans.append(("1 row, wider", 1, dataclasses.replace(usual, hidden=640, heads=8, vocab=1000), True))
        for own in large:
            label = ", ".join(f"{name} {value}" for name, value in own.items())
            sizes = dataclasses.replace(usual, head_dim=dims[0], **own)
            plans += [(f"{rows} row{'s'[: rows - 1]}, {label}", rows, sizes, True) for rows in LARGE_ROWS]
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} {tag}")
        kv_heads = draw.choice((1, 2))
        sizes = Sizes(
            hidden=16 * draw.randint(2, 30),
            heads=kv_heads * draw.randint(1, 4),
            kv_heads=kv_heads,
            head_dim=draw.choice(dims),
            experts=draw.choice((4, 8, 32)),
            top_k=draw.randint(1, 4),
            vocab=draw.randint(1, 3000),
        )
        rows = draw.choice((1, draw.randint(2, 30), draw.randint(2, 300)))
        plans.append((f"fuzz {number} of seed {wanted.seed}", rows, sizes, draw.random() < 0.7))
    for number, (name, rows, sizes, delta) in enumerate(plans):
        maker = Maker(torch.Generator().manual_seed(wanted.seed * 1000 + number), wanted.roles)
        yield Call(name, make(maker, rows, sizes, delta), traits(rows, sizes))


def _stream(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> dict[str, object]:
    return {
        "residual": maker.normal(rows, sizes.hidden, std=2.0),
        "delta": maker.normal(rows, sizes.hidden) if delta else None,
        "norm_weight": maker.norm(sizes.hidden),
        "eps": EPS,
    }


def _qkv_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    """The last of many rows are padding, whose keys go nowhere; slots in any order."""
    real = rows if rows < 3 else rows - 2
    kv = getattr(torch, maker.roles["kv"])
    packed = (sizes.heads + 2 * sizes.kv_heads) * sizes.head_dim
    angle = torch.rand(64, sizes.head_dim // 2, generator=maker.generator) * 6.28
    caches = torch.full((2, BLOCKS, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim), UNTOUCHED, dtype=kv)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=maker.generator)[:real]
    table = torch.zeros(real, 1, dtype=torch.int32)
    return {
        **_stream(maker, rows, sizes, delta),
        "weight": maker.matrix(packed, sizes.hidden),
        "bias": maker.normal(packed, std=0.5),
        "cos_sin": (torch.cat((angle.cos(), angle.sin()), -1) * 1.3).to(getattr(torch, maker.roles["hidden"])),
        "positions": torch.randint(1, 64, (rows,), generator=maker.generator),
        "key_cache": caches[0],
        "value_cache": caches[1].clone(),
        "metadata": AttentionMetadata(tuple(range(real + 1)), (1,) * real, table, slots),
    }


def _output_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    inner = sizes.heads * sizes.head_dim
    return {
        "attended": maker.normal(rows, inner),
        "weight": maker.matrix(sizes.hidden, inner),
        "bias": maker.normal(sizes.hidden, std=0.5),
        "residual": maker.normal(rows, sizes.hidden, std=2.0) if delta else None,
    }


def _router_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    """Of many drawn rows those whose chosen logits lie furthest apart: rounding must not change the choice."""
    drawn = _stream(maker, 12 * rows, sizes, delta)
    shared = {
        "norm_weight": drawn["norm_weight"],
        "eps": EPS,
        "weight": maker.normal(sizes.experts, sizes.hidden, std=2 * sizes.hidden**-0.5, role="weight"),
        "bias": maker.normal(sizes.experts, std=1.0),
        "top_k": sizes.top_k,
    }
    stream = drawn["residual"].float() + (drawn["delta"].float() if delta else 0.0)
    normed = stream / (stream.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * shared["norm_weight"]
    values = (normed @ shared["weight"].float().T + shared["bias"].float()).sort(-1, descending=True).values
    gaps = (values[:, :-1] - values[:, 1:])[:, : sizes.top_k].amin(-1)
    kept = gaps.topk(rows).indices
    live = torch.ones(rows, dtype=torch.int32)
    if rows > 2:
        live[-1] = 0
    picked = {"residual": drawn["residual"][kept], "delta": drawn["delta"][kept] if delta else None}
    return {**picked, **shared, "live": live}


def _add_norm_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    """The first row is small, so that epsilon counts."""
    stream = _stream(maker, rows, sizes, delta)
    for name in ("residual", "delta"):
        if stream[name] is not None:
            stream[name][0] *= 1e-3
    return stream


def _logits_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    return {"normed": maker.normal(rows, sizes.hidden), "weight": maker.matrix(sizes.vocab, sizes.hidden)}


def _greedy_inputs(maker: Maker, rows: int, sizes: Sizes, delta: bool) -> Inputs:
    """Equal largest ones, and damage, in some rows; more logits than one program of a kernel takes."""
    drawn = maker.normal(rows, sizes.vocab * 9, role="logits")
    for row in range(0, rows, 2):
        drawn[row, [sizes.vocab * 8, sizes.vocab * 5, sizes.vocab * 7]] = 9.0
    for row, value in zip(range(1, rows, 3), (float("nan"), float("inf"), float("-inf")), strict=False):
        drawn[row, sizes.vocab * 6] = value
    return {"logits": drawn}


def _named(*names: str) -> Callable[[object], Outputs]:
    return lambda results: dict(zip(names, results if isinstance(results, tuple) else (results,), strict=True))


def run_qkv(inputs: Inputs, kernel: str) -> Outputs:
    residual, query = qkv(**inputs, kernel=kernel)
    return {
        "residual": residual,
        "query": query,
        "key_cache": inputs["key_cache"],
        "value_cache": inputs["value_cache"],
    }


def run_router(inputs: Inputs, kernel: str) -> Outputs:
    results = _named("residual", "normed", "weights", "ids")(router(**inputs, kernel=kernel))
    return {**results, "ids": results["ids"].to(torch.int64)}


def run_logits(inputs: Inputs, kernel: str) -> Outputs:
    shape = inputs["normed"].shape[0], inputs["weight"].shape[0]
    return {"out": logits(**inputs, out=inputs["normed"].new_full(shape, UNTOUCHED), kernel=kernel)}


def _check(
    operation: Operation,
    make: Callable[[Maker, int, Sizes, bool], Inputs],
    run: Callable[[Inputs, str], Outputs],
    mistakes: tuple[Mistake, ...],
    dtypes: Mapping[str, tuple[str, ...]],
    large: Sequence[Mapping[str, int]] = (WIDE,),
    **more: object,
) -> Check:
    def traits(rows: int, sizes: Sizes) -> dict[str, object]:
        return {n: v for n, v in (("rows", row_class(rows)), ("head_dim", sizes.head_dim)) if n in operation.traits}

    return Check(
        operation.name,
        operation.summary,
        lambda wanted: _calls(wanted, operation.mode, make, traits, large),
        run,
        lambda inputs: run(widened(inputs), f"{operation.name}.reference"),
        mistakes,
        dtypes,
        operation=operation,
        **more,
    )


def run_output(inputs: Inputs, kernel: str) -> Outputs:
    return {"out": output(**inputs, kernel=kernel)}


def run_add_norm(inputs: Inputs, kernel: str) -> Outputs:
    return _named("residual", "normed")(add_norm(**inputs, kernel=kernel))


def run_greedy(inputs: Inputs, kernel: str) -> Outputs:
    return {"ids": greedy(inputs["logits"], kernel=kernel)}


def _optional(name: str, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    return with_inputs(name, **{key: lambda i: None if i[key] is None else change(i[key])})


def _scales(inputs: Inputs) -> Weight | None:
    weight = inputs["weight"]
    return None if isinstance(weight, torch.Tensor) else dataclasses.replace(weight, scales=weight.scales.roll(1))


def _turned(change: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]) -> Callable[[Inputs], object]:
    return lambda i: torch.cat(change(*i["cos_sin"].chunk(2, -1)), -1)


def _neighbours(inputs: Inputs) -> Weight | None:
    """RoPE of neighbours (0, 1), (2, 3) instead of the two halves, as a table that turns pair i by another's angle."""
    cos, sin = inputs["cos_sin"].chunk(2, -1)
    return torch.cat((cos.flip(-1), sin.flip(-1)), -1)


STREAM_MISTAKES = (
    with_inputs("norm weight dropped", norm_weight=lambda i: torch.ones_like(i["norm_weight"])),
    with_inputs("norm weight with one added", norm_weight=lambda i: i["norm_weight"] + 1),
    with_inputs("residual dropped", residual=lambda i: torch.zeros_like(i["residual"])),
    _optional("delta dropped", "delta", torch.zeros_like),
    _optional("delta twice", "delta", lambda t: 2 * t.float()),
)
BIAS_MISTAKES = (
    _optional("bias dropped", "bias", torch.zeros_like),
    _optional("bias twice", "bias", lambda t: 2 * t),
)
EIGHT_BIT_MISTAKES = (with_inputs("scale of the next row", weight=_scales),)
QKV_MISTAKES = (
    *STREAM_MISTAKES,
    *BIAS_MISTAKES,
    *EIGHT_BIT_MISTAKES,
    with_inputs("RoPE halves swapped", cos_sin=_turned(lambda cos, sin: (cos, -sin))),
    with_inputs("cosine and sine swapped", cos_sin=_turned(lambda cos, sin: (sin, cos))),
    with_inputs("angles in reverse order", cos_sin=_neighbours),
    with_inputs("RoPE left out", cos_sin=_turned(lambda cos, sin: (torch.ones_like(cos), torch.zeros_like(sin)))),
    with_inputs("position one too far", positions=lambda i: i["positions"] - 1),
    with_inputs(
        "slot off by one",
        metadata=lambda i: dataclasses.replace(
            i["metadata"], slot_mapping=(i["metadata"].slot_mapping + 1) % (BLOCKS * BLOCK_SIZE), plans={}
        ),
    ),
)
OUTPUT_MISTAKES = (
    _optional("residual dropped", "residual", torch.zeros_like),
    *BIAS_MISTAKES,
    *EIGHT_BIT_MISTAKES,
)
ROUTER_MISTAKES = (
    *STREAM_MISTAKES,
    *BIAS_MISTAKES,
    with_inputs("smallest logits chosen", weight=lambda i: -i["weight"], bias=lambda i: -i["bias"]),
    with_inputs(
        "padding rows routed", live=lambda i: torch.ones_like(i["live"]) if bool((i["live"] == 0).any()) else None
    ),
    Mistake("routing weight dropped", lambda i, definition: _unweighted(definition(i))),
)
NORM_MISTAKES = (*STREAM_MISTAKES, with_inputs("no epsilon", eps=lambda i: 0.0))
LOGITS_MISTAKES = (*EIGHT_BIT_MISTAKES, with_inputs("rows one too far", normed=lambda i: _rolled(i["normed"])))
GREEDY_MISTAKES = (
    Mistake("last of equals", lambda i, definition: _last_of_equals(i["logits"], definition(i))),
    Mistake("damage not reported", lambda i, definition: {"ids": i["logits"].nan_to_num().argmax(-1)}),
    Mistake("one token further", lambda i, definition: {"ids": definition(i)["ids"] + 1}),
)


def _unweighted(right: Outputs) -> Outputs | None:
    return {**right, "weights": (right["ids"] >= 0).float()} if right["ids"].shape[1] > 1 else None


def _rolled(rows: torch.Tensor) -> torch.Tensor | None:
    return rows.roll(1, 0) if len(rows) > 1 else None


def _last_of_equals(drawn: torch.Tensor, right: Outputs) -> Outputs:
    last = drawn.shape[1] - 1 - drawn.flip(-1).argmax(-1)
    return {"ids": torch.where(right["ids"] < 0, right["ids"], last)}


_WEIGHTED = {"hidden": FLOATS, "weight": (*FLOATS, FP8)}
CHECKS = (
    _check(QKV, _qkv_inputs, run_qkv, QKV_MISTAKES, {**_WEIGHTED, "kv": FLOATS}, (WIDE, MANY_HEADS)),
    _check(OUTPUT, _output_inputs, run_output, OUTPUT_MISTAKES, _WEIGHTED, (MANY_HEADS,)),
    _check(ROUTER, _router_inputs, run_router, ROUTER_MISTAKES, {"hidden": FLOATS, "weight": FLOATS}),
    _check(ADD_NORM, _add_norm_inputs, run_add_norm, NORM_MISTAKES, {"hidden": FLOATS}),
    _check(LOGITS, _logits_inputs, run_logits, LOGITS_MISTAKES, _WEIGHTED),
    _check(GREEDY, _greedy_inputs, run_greedy, GREEDY_MISTAKES, {"logits": FLOATS}, (), precisions={"ids": "exact"}),
)
