"""Paged attention and the cache write: their calls, and the mistakes that attention with sinks invites."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise

import torch

from npu_gptoss.attention import AttentionMetadata, paged_attention, write_kv_cache
from npu_gptoss.attention.operations import KV_DTYPES, PAGED, WRITE_KV
from npu_gptoss.verify.calls import Call, Check, Definition, Inputs, Mistake, Outputs, Wanted, widened, with_inputs
from npu_gptoss.verify.steps import LARGE_STEPS, STEPS, WINDOW, Shape, StepTensors, as_decode, plant, step_tensors

HEAD_DIMS, BLOCK_SIZES = (64, 128, 32, 16), (16, 128, 32, 64, 256)
WINDOWS = (None, WINDOW, 1, 17)


def _inputs(step: StepTensors, window: int | None, roles: Mapping[str, str]) -> Inputs:
    dtypes = {role: getattr(torch, name) for role, name in roles.items()}
    return {
        "query": step.query.to(dtypes["query"]),
        "key_cache": step.key_cache.to(dtypes["kv"]),
        "value_cache": step.value_cache.to(dtypes["kv"]),
        "metadata": step.metadata,
        "sinks": step.sinks.to(dtypes["sinks"]),
        "scale": step.query.shape[2] ** -0.5,
        "sliding_window": window,
    }


def _call(
    name: str,
    wanted: Wanted,
    requests: list[tuple[int, int]],
    window: int | None,
    shape: Shape,
    seed: int,
    padding: int = 3,
    decode: bool = False,
) -> Call:
    step = step_tensors(requests, shape, torch.Generator().manual_seed(seed), padding=0 if decode else padding)
    if window is not None:
        plant(step, window)
    if decode:
        step = as_decode(step, max(keys for _, keys in requests) + 5, padding)
    traits = {"head_dim": shape.head_dim, "block_size": shape.block_size, "sliding_window": window is not None}
    return Call(name, _inputs(step, window, wanted.roles), traits)


def _named(window: int | None) -> str:
    return "all keys" if window is None else f"window {window}"


def paged_calls(wanted: Wanted) -> Iterator[Call]:
    """All steps at the usual shape with each window; each other head and block size once; long contexts and large
    batches; then random steps."""
    dims, sizes = wanted.values("head_dim", HEAD_DIMS), wanted.values("block_size", BLOCK_SIZES)
    windowed = wanted.values("sliding_window", (True, False))
    windows = [w for w in WINDOWS if (w is not None) in windowed]
    own_windows = [w for w in windows if w in (None, WINDOW)]  # gpt-oss's
    usual = Shape(head_dim=dims[0], block_size=sizes[0])
    if wanted.thorough:
        for window in windows:
            label = _named(window)
            for name, requests in STEPS.items():
                yield _call(f"{name}, {label}", wanted, requests, window, usual, 0)
            requests = STEPS["decode at the window's edge"]
            yield _call(f"lengths on the device with padding, {label}", wanted, requests, window, usual, 1, decode=True)
        mixed = STEPS["mixed, one without rows"]
        for shape in (
            *(dataclasses.replace(usual, head_dim=dim) for dim in dims[1:]),
            *(dataclasses.replace(usual, block_size=size) for size in sizes[1:]),
            *(dataclasses.replace(usual, heads=heads, kv_heads=kv) for heads, kv in ((8, 1), (1, 1), (64, 8), (6, 2))),
        ):
            for window in own_windows[: 1 if shape.heads == 64 else 2]:
                label = f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, blocks of {shape.block_size}"
                yield _call(f"mixed, {label}, window {window}", wanted, mixed, window, shape, 2)
        for name, requests in LARGE_STEPS.items():
            decode = all(rows == 1 for rows, _ in requests)  # as in a graph: lengths on the device
            for window in own_windows:
                yield _call(f"{name}, {_named(window)}", wanted, requests, window, usual, 3, 0 if decode else 3, decode)
    else:
        for window in own_windows:
            chunks = STEPS["chunks that cross the window"]
            yield _call(f"chunks that cross the window, window {window}", wanted, chunks, window, usual, 0)
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} paged")
        kv_heads = draw.choice((1, 2, 3))
        shape = Shape(kv_heads * draw.choice((1, 2, 5, 8)), kv_heads, draw.choice(dims), draw.choice(sizes))
        requests = []
        for _ in range(draw.randint(1, 6)):
            keys = draw.choice((draw.randint(1, 20), draw.randint(100, 160), draw.randint(1, 600)))
            requests.append((min(keys, draw.choice((1, 1, 2, draw.randint(1, 150), keys))), keys))
        window = draw.choice([w if w in (None, WINDOW) else draw.randint(1, 200) for w in windows])
        padding = draw.choice((0, 0, 7))
        decode = draw.random() < 0.2 and all(rows == 1 for rows, _ in requests)
        name = f"fuzz {number} of seed {wanted.seed}"
        if decode:
            name += f", lengths on the device{' with padding' if padding else ''}"
        name += f", {_named(window)}"
        yield _call(name, wanted, requests, window, shape, draw.getrandbits(32), padding, decode)


def run_paged(inputs: Inputs, kernel: str) -> Outputs:
    """Into a buffer full of NaN: what the kernel does not write shows."""
    out = torch.full_like(inputs["query"], float("nan"))
    return {"out": paged_attention(**inputs, out=out, kernel=kernel)}


def define_paged(inputs: Inputs) -> Outputs:
    return run_paged(widened(inputs), f"{PAGED.name}.reference")


def paged_sizes(inputs: Inputs) -> Outputs:
    """The same attention over absolute values: the sum of the sizes of what a result sums."""
    wide = widened(inputs)
    return run_paged({**wide, "value_cache": wide["value_cache"].abs()}, f"{PAGED.name}.reference")


def _one_key_ahead(inputs: Inputs, definition: Definition) -> Outputs | None:
    """Causal off by one: each row but a request's last sees the next key too, as if it stood one row further down."""
    metadata = inputs["metadata"]
    if metadata.max_query_len < 2:
        return None
    query, out = inputs["query"].clone(), definition(inputs)["out"].clone()
    for start, end in pairwise(metadata.query_start_loc):
        query[start + 1 : end] = inputs["query"][start : end - 1].clone()
    shifted = definition({**inputs, "query": query})["out"]
    for start, end in pairwise(metadata.query_start_loc):
        out[start : end - 1] = shifted[start + 1 : end]
    return {"out": out}


def _other_metadata(name: str, change: Callable[[AttentionMetadata, int], AttentionMetadata | None]) -> Mistake:
    """Unused blocks hold numbers here, as they do in a server: the mistake is found by its result, not by NaN."""

    def answer(inputs: Inputs, definition: Definition) -> Outputs | None:
        metadata = inputs["metadata"]
        if not isinstance(metadata, AttentionMetadata):
            return None
        changed = change(metadata, inputs["key_cache"].shape[1])
        if changed is None:
            return None
        caches = {name: inputs[name].nan_to_num(nan=0.5) for name in ("key_cache", "value_cache")}
        return definition({**inputs, **caches, "metadata": changed})

    return Mistake(name, answer)


def _next_requests_table(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata | None:
    if metadata.num_requests < 2:
        return None
    return dataclasses.replace(metadata, block_table=metadata.block_table.roll(1, 0), plans={})


def _next_block(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata | None:
    if max(metadata.seq_lens) <= block_size:
        return None
    return dataclasses.replace(metadata, block_table=metadata.block_table.roll(-1, 1), plans={})


def _short_keys(metadata: AttentionMetadata, block_size: int) -> AttentionMetadata | None:
    start = metadata.query_start_loc
    lengths = tuple(max(n - 1, b - a) for n, (a, b) in zip(metadata.seq_lens, pairwise(start), strict=True))
    return None if lengths == metadata.seq_lens else dataclasses.replace(metadata, seq_lens=lengths, plans={})


def _tail_kept(inputs: Inputs, definition: Definition) -> Outputs | None:
    out, tokens = definition(inputs)["out"].clone(), inputs["metadata"].num_tokens
    if out.shape[0] == tokens:
        return None
    out[tokens:] = 1.0
    return {"out": out}


def _window(by: int) -> Callable[[Inputs], int | None]:
    return lambda inputs: inputs["sliding_window"] + by if (inputs["sliding_window"] or 0) > 1 else None


def _no_window(inputs: Inputs, definition: Definition) -> Outputs | None:
    return definition({**inputs, "sliding_window": None}) if inputs["sliding_window"] else None


def _window_on_full(inputs: Inputs, definition: Definition) -> Outputs | None:
    return None if inputs["sliding_window"] else definition({**inputs, "sliding_window": WINDOW})


def _heads_in_turn(inputs: Inputs, definition: Definition) -> Outputs | None:
    """Query head h reads key head h % kv_heads instead of h // group."""
    heads, kv_heads = inputs["query"].shape[1], inputs["key_cache"].shape[2]
    if kv_heads == 1 or heads == kv_heads:
        return None
    order = torch.arange(heads).view(-1, kv_heads).t().flatten()
    turned = definition({**inputs, "query": inputs["query"][:, order], "sinks": inputs["sinks"][order]})["out"]
    return {"out": turned[:, order.argsort()]}


PAGED_MISTAKES = (
    with_inputs("sink dropped", sinks=lambda i: torch.full_like(i["sinks"], -1e4)),
    with_inputs("sink counted twice", sinks=lambda i: i["sinks"].float() + math.log(2)),
    with_inputs("sink of head 0 for all", sinks=lambda i: i["sinks"][:1].expand_as(i["sinks"])),
    with_inputs("sinks in reverse order", sinks=lambda i: i["sinks"].flip(0)),
    with_inputs("sinks scaled like scores", sinks=lambda i: i["sinks"].float() * i["scale"]),
    with_inputs("window 127 for 128", sliding_window=_window(-1)),
    with_inputs("window 129 for 128", sliding_window=_window(1)),
    Mistake("window ignored", _no_window),
    Mistake("window on a layer that sees all", _window_on_full),
    Mistake("causal off by one", _one_key_ahead),
    with_inputs("scale missing", scale=lambda i: 1.0),
    with_inputs("scale twice", scale=lambda i: i["scale"] ** 2),
    _other_metadata("block table of the next request", _next_requests_table),
    _other_metadata("block table off by one", _next_block),
    _other_metadata("keys one too short", _short_keys),
    with_inputs("keys for values", value_cache=lambda i: i["key_cache"]),
    Mistake("key heads in turn, not in groups", _heads_in_turn),
    Mistake("padded rows not zeroed", _tail_kept),
)


def write_calls(wanted: Wanted) -> Iterator[Call]:
    """New rows of several requests; the slots as int64 and as int32."""
    dims, sizes = wanted.values("head_dim", HEAD_DIMS), wanted.values("block_size", BLOCK_SIZES)
    edges = [("three rows and one", [(3, 20), (1, 33)]), ("one row", [(1, 1)]), ("whole blocks", [(256, 256)])]
    steps = [(f"{n}, heads of {d}", r, Shape(8, 2, d, sizes[0])) for n, r in edges for d in dims[:2]]
    steps += [(f"blocks of {s}", edges[0][1], Shape(8, 2, dims[0], s)) for s in sizes[1:]]
    if not wanted.thorough:
        steps = steps[:1]
    for number in range(wanted.cases):
        draw = random.Random(f"{wanted.seed} {number} write")
        keys = [draw.randint(1, 300) for _ in range(draw.randint(1, 5))]
        shape = Shape(8, draw.choice((1, 2, 8)), draw.choice(dims), draw.choice(sizes))
        steps.append((f"fuzz {number} of seed {wanted.seed}", [(draw.randint(1, n), n) for n in keys], shape))
    for number, (name, requests, shape) in enumerate(steps):
        generator = torch.Generator().manual_seed(number)
        step = step_tensors(requests, shape, generator)
        tokens, kv = step.metadata.num_tokens, getattr(torch, wanted.roles["kv"])
        new = torch.randn(2, tokens + 2, shape.kv_heads, shape.head_dim, generator=generator)
        new = new.to(getattr(torch, wanted.roles["key"]))
        slots = step.metadata.slot_mapping.to(torch.int32 if number % 2 else torch.int64)
        yield Call(
            f"{name}, {slots.dtype} slots",
            {
                "key": new[0],
                "value": new[1],
                "key_cache": step.key_cache.to(kv),
                "value_cache": step.value_cache.to(kv),
                "metadata": dataclasses.replace(step.metadata, slot_mapping=slots),
            },
            {"head_dim": shape.head_dim, "block_size": shape.block_size},
        )


def run_write(inputs: Inputs, kernel: str) -> Outputs:
    write_kv_cache(**inputs, kernel=kernel)
    return {"key_cache": inputs["key_cache"], "value_cache": inputs["value_cache"]}


def define_write(inputs: Inputs) -> Outputs:
    """In the dtypes of the call: a value is moved, and at most rounded to the cache's dtype."""
    caches = {name: inputs[name].clone() for name in ("key_cache", "value_cache")}
    return run_write({**inputs, **caches}, f"{WRITE_KV.name}.reference")


def _slots(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Inputs], AttentionMetadata]:
    return lambda i: dataclasses.replace(i["metadata"], slot_mapping=change(i["metadata"].slot_mapping), plans={})


WRITE_MISTAKES = (
    with_inputs("slot off by one", metadata=_slots(lambda slots: slots + 1)),
    with_inputs("slots in reverse order", metadata=lambda i: _reversed(i)),
    with_inputs("values for keys", key=lambda i: i["value"]),
    with_inputs("rows one too far", key=lambda i: i["key"].roll(1, 0)),
)


def _reversed(inputs: Inputs) -> AttentionMetadata | None:
    tokens = inputs["metadata"].num_tokens
    return _slots(lambda slots: slots[:tokens].flip(0))(inputs) if tokens > 1 else None


CHECKS = (
    Check(
        PAGED.name,
        PAGED.summary,
        paged_calls,
        run_paged,
        define_paged,
        PAGED_MISTAKES,
        {"query": KV_DTYPES, "kv": KV_DTYPES, "sinks": KV_DTYPES},
        sizes=paged_sizes,
        operation=PAGED,
    ),
    Check(
        WRITE_KV.name,
        WRITE_KV.summary,
        write_calls,
        run_write,
        define_write,
        WRITE_MISTAKES,
        {"key": KV_DTYPES, "kv": KV_DTYPES},
        precisions={"key_cache": "exact", "value_cache": "exact"},
        operation=WRITE_KV,
    ),
)
