"""Paged attention and the cache write: their calls."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from npu_gptoss import attention
from npu_gptoss.attention import paged_attention, write_kv_cache
from npu_gptoss.attention.operations import FP8, KV_DTYPES, PAGED, WRITE_KV
from npu_gptoss.verify.attention_cases import LARGE_STEPS, STEPS, WINDOW, Shape, as_decode, make_step, plant
from npu_gptoss.verify.calls import Call, CallSpec, Check
from npu_gptoss.verify.cases import Inputs, widened
from npu_gptoss.verify.compare import Outputs

HEAD_DIMS, BLOCK_SIZES = (64, 128, 32, 16), (16, 128, 32, 64, 256, 48, 512)
WINDOWS = (None, WINDOW, 1, 17)


def paged_call(
    name: str,
    spec: CallSpec,
    requests: list[tuple[int, int]],
    window: int | None,
    shape: Shape,
    seed: int,
    padding: int = 3,
    decode: bool = False,
) -> Call:
    step = make_step(requests, shape, torch.Generator().manual_seed(seed), padding=0 if decode else padding)
    if window is not None:
        plant(step, window)
    if decode:
        step = as_decode(step, max(keys for _, keys in requests) + 5, padding)
    dtypes = {role: getattr(torch, dtype) for role, dtype in spec.roles.items()}
    roles = {"query": "query", "key_cache": "kv", "value_cache": "kv", "sinks": "sinks"}
    step = dataclasses.replace(step, **{name: getattr(step, name).to(dtypes[role]) for name, role in roles.items()})
    longest = step.metadata.max_query_len
    _, traits = attention.paged_call(longest, step.query, step.key_cache, step.sinks, window)
    return Call(name, step.inputs(window), traits)


def _named(window: int | None) -> str:
    return "all keys" if window is None else f"window {window}"


def paged_calls(spec: CallSpec) -> Iterator[Call]:
    """All steps at the usual shape with each window; each other head and block size once; long contexts and large
    batches; then random steps."""
    dims, sizes = spec.values("head_dim", HEAD_DIMS), spec.values("block_size", BLOCK_SIZES)
    windowed = spec.values("sliding_window", (True, False))
    windows = [w for w in WINDOWS if (w is not None) in windowed]
    own_windows = [w for w in windows if w in (None, WINDOW)]  # gpt-oss's
    usual = Shape(head_dim=dims[0], block_size=sizes[0])
    if spec.thorough:
        for window in windows:
            label = _named(window)
            for name, requests in STEPS.items():
                yield paged_call(f"{name}, {label}", spec, requests, window, usual, 0)
            requests = STEPS["decode at the window's edge"]
            yield paged_call(f"lengths on the device with padding, {label}", spec, requests, window, usual, 1, 3, True)
        mixed = STEPS["mixed, one without rows"]
        for shape in (
            *(dataclasses.replace(usual, head_dim=dim) for dim in dims[1:]),
            *(dataclasses.replace(usual, block_size=size) for size in sizes[1:]),
            *(dataclasses.replace(usual, heads=heads, kv_heads=kv) for heads, kv in ((8, 1), (1, 1), (64, 8), (6, 2))),
        ):
            for window in own_windows[: 1 if shape.heads == 64 else 2]:
                label = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, blocks of {shape.block_size}"
                yield paged_call(f"mixed, {label}, window {window}", spec, mixed, window, shape, 2)
        for name, requests in LARGE_STEPS.items():
            decode = all(rows == 1 for rows, _ in requests)  # as in a graph: lengths on the device
            for window in own_windows:
                label = f"{name}, {_named(window)}"
                yield paged_call(label, spec, requests, window, usual, 3, 0 if decode else 3, decode)
    else:
        for name in ("chunks that cross the window", "decode at the window's edge"):
            for window in own_windows:
                yield paged_call(f"{name}, window {window}", spec, STEPS[name], window, usual, 0)
    for name, draw in spec.fuzz("paged"):
        kv_heads = draw.choice((1, 2, 3))
        shape = Shape(kv_heads * draw.choice((1, 2, 5, 8)), kv_heads, draw.choice(dims), draw.choice(sizes))
        requests = []
        for _ in range(draw.randint(1, 6)):
            keys = draw.choice((draw.randint(1, 20), draw.randint(100, 160), draw.randint(1, 600)))
            requests.append((min(keys, draw.choice((1, 1, 2, draw.randint(1, 150), keys))), keys))
        window = draw.choice([w if w in (None, WINDOW) else draw.randint(1, 200) for w in windows])
        padding = draw.choice((0, 0, 7))
        decode = draw.random() < 0.2 and all(rows == 1 for rows, _ in requests)
        if decode:
            name += f", lengths on the device{' with padding' if padding else ''}"
        name += f", {_named(window)}"
        yield paged_call(name, spec, requests, window, shape, draw.getrandbits(32), padding, decode)


def run_paged(inputs: Inputs, kernel: str | None) -> Outputs:
    """Runs into a buffer full of NaN, so that rows that the kernel does not write show."""
    out = torch.full_like(inputs["query"], float("nan"))
    return {"out": paged_attention(**inputs, out=out, kernel=kernel)}


def paged_sizes(inputs: Inputs) -> Outputs:
    """The same attention over absolute values: the sum of the absolute products of each result."""
    wide = widened(inputs)
    return run_paged({**wide, "value_cache": wide["value_cache"].abs()}, f"{PAGED.name}.reference")


def write_calls(spec: CallSpec) -> Iterator[Call]:
    """New rows of several requests; the slots as int64 and as int32."""
    dims, sizes = spec.values("head_dim", HEAD_DIMS), spec.values("block_size", BLOCK_SIZES)
    edges = [("three rows and one", [(3, 20), (1, 33)]), ("one row", [(1, 1)]), ("whole blocks", [(256, 256)])]
    steps = [(f"{n}, heads of {d}", r, Shape(8, 2, d, sizes[0])) for n, r in edges for d in dims[:2]]
    steps += [(f"blocks of {s}", edges[0][1], Shape(8, 2, dims[0], s)) for s in sizes[1:]]
    if not spec.thorough:
        steps = steps[:1]
    for name, draw in spec.fuzz("write"):
        keys = [draw.randint(1, 300) for _ in range(draw.randint(1, 5))]
        shape = Shape(8, draw.choice((1, 2, 8)), draw.choice(dims), draw.choice(sizes))
        steps.append((name, [(draw.randint(1, n), n) for n in keys], shape))
    for number, (name, requests, shape) in enumerate(steps):
        generator = torch.Generator().manual_seed(number)
        step = make_step(requests, shape, generator)
        tokens, kv = step.metadata.num_tokens, getattr(torch, spec.roles["kv"])
        new = torch.randn(2, tokens + 2, shape.kv_heads, shape.head_dim, generator=generator)
        new = new.to(getattr(torch, spec.roles["key"]))
        slots = step.metadata.slot_mapping.to(torch.int32 if number % 2 else torch.int64)
        inputs = {
            "key": new[0],
            "value": new[1],
            "key_cache": step.key_cache.to(kv),
            "value_cache": step.value_cache.to(kv),
            "metadata": dataclasses.replace(step.metadata, slot_mapping=slots),
        }
        traits = {"head_dim": shape.head_dim, "block_size": shape.block_size}
        yield Call(f"{name}, {slots.dtype} slots", inputs, traits)


def run_write(inputs: Inputs, kernel: str | None) -> Outputs:
    write_kv_cache(**inputs, kernel=kernel)
    return {"key_cache": inputs["key_cache"], "value_cache": inputs["value_cache"]}


def define_write(inputs: Inputs) -> Outputs:
    """Defines the write in the dtypes of the call: a value is moved, and at most rounded to the cache's dtype."""
    caches = {name: inputs[name].clone() for name in ("key_cache", "value_cache")}
    return run_write({**inputs, **caches}, f"{WRITE_KV.name}.reference")


_PAGED_ROLES = {"query": KV_DTYPES, "kv": (*KV_DTYPES, FP8), "sinks": KV_DTYPES}
_EXACT = {"key_cache": "exact", "value_cache": "exact"}
CHECKS = (
    Check(PAGED, paged_calls, run_paged, _PAGED_ROLES, sizes=paged_sizes),
    Check(WRITE_KV, write_calls, run_write, {"key": KV_DTYPES, "kv": (*KV_DTYPES, FP8)}, _EXACT, define_write),
)
