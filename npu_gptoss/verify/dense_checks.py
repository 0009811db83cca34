"""Norms, projections, RoPE, router and logits: their calls."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import torch

from npu_gptoss import dense
from npu_gptoss.attention.operations import FP8
from npu_gptoss.dense import operations
from npu_gptoss.dense.operations import ADD_NORM, FLOATS, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN
from npu_gptoss.kernels import Operation
from npu_gptoss.moe.operations import FEW_ROWS
from npu_gptoss.verify.calls import Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs
from npu_gptoss.verify.compare import Outputs
from npu_gptoss.verify.dense_cases import UNTOUCHED, DenseInputs, Sizes

HEAD_DIMS = (64, 16, 128, 32)
BOTH = (True, False)
ROWS = (1, 2, 3, 17, FEW_ROWS, FEW_ROWS + 1)
LARGE_ROWS = (1, 20, 140)
# gpt-oss's own sizes, apart, so that matrices stay small
WIDE, MANY_HEADS = {"hidden": 2880, "experts": 32}, {"heads": 64, "kv_heads": 8}
LARGE = {QKV: (WIDE, MANY_HEADS), ROTATE_WRITE: (MANY_HEADS,), OUTPUT: (MANY_HEADS,), GREEDY: ()}  # WIDE for the others


def dense_calls(spec: CallSpec, operation: Operation) -> Iterator[Call]:
    """Each class of rows and its edges with and without delta; each head size; large sizes; then random ones."""
    dims = spec.values("head_dim", HEAD_DIMS)
    plans: list[tuple[str, int, Sizes, bool]] = []
    usual = Sizes(head_dim=16 if 16 in dims else dims[0])
    for rows in ROWS if spec.thorough else (1, 3):
        plans += [(f"{rows} row{'s'[: rows - 1]}, {'sum' if delta else 'plain'}", rows, usual, delta) for delta in BOTH]
    if spec.thorough:
        plans += [(f"3 rows, heads of {dim}", 3, dataclasses.replace(usual, head_dim=dim), True) for dim in dims]
        plans.append(("1 row, wider", 1, dataclasses.replace(usual, hidden=640, heads=8, vocab=1000), True))
        for own in LARGE.get(operation, (WIDE,)):
            label = ", ".join(f"{name} {value}" for name, value in own.items())
            sizes = dataclasses.replace(usual, head_dim=dims[0], **own)
            plans += [(f"{rows} row{'s'[: rows - 1]}, {label}", rows, sizes, True) for rows in LARGE_ROWS]
    for name, draw in spec.fuzz(operation.mode):
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
        plans.append((name, rows, sizes, draw.random() < 0.7))
    for number, (name, rows, sizes, delta) in enumerate(plans):
        if operation in (GREEDY, TOKEN):  # more logits than one program of a kernel takes
            sizes = dataclasses.replace(sizes, vocab=9 * sizes.vocab)
        generator = torch.Generator().manual_seed(spec.seed * 1000 + number)
        inputs = DenseInputs(generator, spec.roles, rows, sizes, delta).of(operation)
        yield Call(name, inputs, _traits(operation, inputs))


def _traits(operation: Operation, inputs: Inputs) -> Mapping[str, object]:
    if operation in (ADD_NORM, GREEDY):
        return {}
    if operation == ROTATE_WRITE:
        qkv, cache = inputs["qkv"], inputs["key_cache"]
        dim = cache.shape[3]
        return operations.rotate_write_call(qkv.dtype, qkv.shape[1] // dim, cache.dtype, dim)[1]
    x = next(inputs[name] for name in ("residual", "attended", "normed") if inputs.get(name) is not None)
    if operation == QKV:
        cache = inputs["key_cache"]
        return operations.qkv_call(len(x), x.dtype, inputs["weight"], cache.dtype, cache.shape[3])[1]
    return operations.CALLS[operation](len(x), x.dtype, inputs["weight"])[1]


def run_dense(inputs: Inputs, kernel: str | None, operation: Operation, names: tuple[str, ...]) -> Outputs:
    """The results by their names, and the caches where the operation writes them."""
    more: dict[str, object] = {}
    if operation == LOGITS:
        more["out"] = inputs["normed"].new_full((len(inputs["normed"]), len(inputs["weight"])), UNTOUCHED)
    if operation == TOKEN:
        more["shortlist"] = dense.Shortlist.of(inputs["weight"])
    found = getattr(dense, operation.mode)(**inputs, **more, kernel=kernel)
    results = dict(zip(names, found if isinstance(found, tuple) else (found,), strict=True))
    if operation == ROTATE_WRITE:  # of padding rows only that they are not stored
        results["query"] = results["query"][: inputs["metadata"].num_tokens]
    if "ids" in results:
        results["ids"] = results["ids"].to(torch.int64)
    return results | {name: inputs[name] for name in ("key_cache", "value_cache") if name in inputs}


_WEIGHTED = {"hidden": FLOATS, "weight": FLOATS}
CHECKS = tuple(
    Check(
        operation,
        functools.partial(dense_calls, operation=operation),
        functools.partial(run_dense, operation=operation, names=names),
        dtypes,
        precisions,
    )
    for operation, names, dtypes, precisions in (
        (QKV, ("residual", "query"), {**_WEIGHTED, "kv": (*FLOATS, FP8)}, {}),
        (ROTATE_WRITE, ("query",), {"qkv": FLOATS, "kv": FLOATS}, {}),
        (OUTPUT, ("out",), _WEIGHTED, {}),
        (ROUTER, ("residual", "normed", "weights", "ids"), _WEIGHTED, {}),
        (ADD_NORM, ("residual", "normed"), {"hidden": FLOATS}, {}),
        (LOGITS, ("out",), _WEIGHTED, {}),
        (TOKEN, ("ids",), _WEIGHTED, {"ids": "exact"}),
        (GREEDY, ("ids",), {"logits": FLOATS}, {"ids": "exact"}),
    )
)
