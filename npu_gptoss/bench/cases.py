"""The calls that `bench kernel` times: every operation at gpt-oss's shapes, with inputs of `verify.cases`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from npu_gptoss import dense, moe
from npu_gptoss.attention import paged_attention, paged_call, write_call, write_kv_cache
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.roofline import (
    BF16_BYTES,
    FP32_BYTES,
    Work,
    attention_decode_work,
    attention_prefill_work,
    expected_distinct,
    expert_bytes,
    experts_work,
    kv_bytes_per_token,
    linear_work,
)
from npu_gptoss.dense.operations import (
    ADD_NORM,
    GREEDY,
    LOGITS,
    OUTPUT,
    QKV,
    ROUTER,
    logits_call,
    output_call,
    qkv_call,
    router_call,
)
from npu_gptoss.kernels import Described, Operation, Signature, signature
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe import mxfp4, packed
from npu_gptoss.moe.operations import EXPERTS, ROUTE, experts_call, route_call
from npu_gptoss.verify.cases import (
    DENSE_INPUTS,
    STD,
    InputFactory,
    Shape,
    Sizes,
    Step,
    as_decode,
    make_step,
    random_experts,
    random_mxfp4,
)

Calls = list[Callable[[], object]]
LAYERS = 8  # whose experts a rotation walks over on a GPU, where a step is small
FEWEST = 8  # calls of a rotation of experts
ROLES = {"mxfp4": moe.Mxfp4Experts.format, "fp8": moe.Fp8Experts.format}  # the names of formats in a weight role


@dataclass(frozen=True)
class Case:
    """One operation at one shape. `calls(kernel)` builds the rotation that runs the kernel of that name."""

    operation: Operation
    name: str
    signature: Signature
    traits: Mapping[str, Any]
    work: Work
    calls: Callable[[str], Calls]


@dataclass(frozen=True)
class Points:
    """The measured points: sizes of decode batches, keys of each request, tokens of prompts, formats of the experts."""

    batches: Sequence[int]
    contexts: Sequence[int] = ()
    prompts: Sequence[int] = ()
    formats: Sequence[str] = ()

    @property
    def rows(self) -> list[int]:
        """Of the operations to which a prompt's token is a row like any other."""
        return sorted({*self.batches, *self.prompts})


@dataclass(frozen=True)
class Inputs:
    """Makes the inputs of one model's shapes, on the device."""

    config: GptOssConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int = 16

    @functools.cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(0)

    @property
    def sizes(self) -> Sizes:
        c = self.config
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        return Sizes(c.hidden_size, *heads, c.num_local_experts, c.num_experts_per_tok, c.vocab_size)

    def step(self, requests: Sequence[tuple[int, int]]) -> Step:
        """One attention step in the measured dtype; its blocks are scattered over a separate cache."""
        sizes = self.sizes
        shape = Shape(sizes.heads, sizes.kv_heads, sizes.head_dim, self.block_size)
        return make_step(requests, shape, self.generator).to(self.device, self.dtype)

    def dense(self, operation: Operation, rows: int) -> dict[str, Any]:
        name = str(self.dtype).removeprefix("torch.")
        roles = dict.fromkeys(("hidden", "weight", "kv", "logits"), name)
        make = InputFactory(self.generator, roles, edges=False)
        return DENSE_INPUTS[operation.name](make, rows, self.sizes, operation is not ROUTER)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(generator=self.generator)

    def empty(self, *shape: int) -> torch.Tensor:
        """A shape for the description of a call."""
        return torch.empty(shape, device="meta", dtype=self.dtype)


def paged_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Decode at every context and batch, prefill of every prompt; each as a full layer and as a window layer."""
    config, sizes = inputs.config, inputs.sizes
    windows = {"full": None, "window": config.sliding_window}
    query = inputs.empty(1, sizes.heads, sizes.head_dim)
    cache = inputs.empty(1, inputs.block_size, sizes.kv_heads, sizes.head_dim)
    for context, batch, (kind, window) in product(points.contexts, points.batches, windows.items()):
        work = attention_decode_work(config, [context] * batch, window)
        build = functools.partial(_decode, inputs, rotation(work.kv_bytes, inputs.device), batch, context, window)
        called = paged_call(1, query, cache, query, window)
        yield Case(PAGED, f"decode {kind} ctx={context} B={batch}", *called, work, build)
    for tokens, (kind, window) in product(points.prompts, windows.items()):
        # queries and results count as bytes
        rows = Work(activation_bytes=2 * tokens * sizes.query * BF16_BYTES)
        work = attention_prefill_work(config, tokens, window) + rows
        called = paged_call(tokens, query, cache, query, window)
        build = functools.partial(_prefill, inputs, tokens, window)
        yield Case(PAGED, f"prefill {kind} {tokens}", *called, work, build)


def _decode(inputs: Inputs, sets: int, batch: int, context: int, window: int | None, kernel: str) -> Calls:
    """Every call reads another cache; lengths are on the device, as in a graph."""
    steps = (as_decode(inputs.step([(1, context)] * batch), context) for _ in range(sets))
    return [_attend(step, window, kernel) for step in steps]


def _prefill(inputs: Inputs, tokens: int, window: int | None, kernel: str) -> Calls:
    """One prompt from an empty cache; its keys and values lie in the cache already."""
    return [_attend(inputs.step([(tokens, tokens)]), window, kernel)]


def _attend(step: Step, window: int | None, kernel: str) -> Callable[[], object]:
    out = torch.empty_like(step.query)
    return functools.partial(paged_attention, **step.inputs(window), out=out, kernel=kernel)


def write_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The keys and values of a step's rows into the cache, one block a row."""
    sizes = inputs.sizes
    heads = sizes.kv_heads, sizes.head_dim
    called = write_call(inputs.empty(1, *heads), inputs.empty(1, inputs.block_size, *heads))

    def build(rows: int, kernel: str) -> Calls:
        step = inputs.step([(1, 1)] * rows)
        new = [cache.flatten(0, 1)[step.metadata.slot_mapping].clone() for cache in (step.key_cache, step.value_cache)]
        return [functools.partial(write_kv_cache, *new, step.key_cache, step.value_cache, step.metadata, kernel=kernel)]

    for rows in points.rows:
        work = Work(kv_bytes=2 * rows * kv_bytes_per_token(inputs.config))  # read once, written once
        yield Case(WRITE_KV, f"rows={rows}", *called, work, functools.partial(build, rows))


def route_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The top-k of a step's router logits."""
    experts, top_k = inputs.sizes.experts, inputs.sizes.top_k

    def build(rows: int, kernel: str) -> Calls:
        return [functools.partial(moe.route, inputs.normal(rows, experts), top_k, kernel=kernel)]

    for rows in points.rows:
        work = Work(activation_bytes=rows * (experts * BF16_BYTES + top_k * 8))
        called = route_call(inputs.dtype)
        yield Case(ROUTE, f"rows={rows} of {experts}", *called, work, functools.partial(build, rows))


def expand_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Gate and up of the experts that so many tokens touch at most, from packed MXFP4 to a ring in bfloat16."""
    config = inputs.config
    experts, columns, depth = config.num_local_experts, 2 * config.intermediate_size, config.hidden_size

    def build(slots: int, kernel: str) -> Calls:
        weights = packed.pack(*random_mxfp4((experts, columns, depth), STD, inputs.generator), halves=True)
        ids = torch.arange(slots, dtype=torch.int32, device=inputs.device)
        ring = torch.empty(slots, depth, columns, dtype=torch.bfloat16, device=inputs.device)
        return [functools.partial(packed.expand, weights, ids, ring, kernel=kernel)]

    for slots in dict.fromkeys(min(experts, rows * config.num_experts_per_tok) for rows in points.rows):
        work = Work(expert_bytes=slots * depth * columns * (mxfp4.BITS / 8 + BF16_BYTES))
        called = signature(out=torch.bfloat16), {"quarter": packed.rows_of(columns) * columns}
        yield Case(packed.EXPAND, f"{slots} of {experts} experts", *called, work, functools.partial(build, slots))


def experts_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The experts' MLPs of one layer for every format of the weights and number of tokens."""
    config, dtype = inputs.config, inputs.dtype
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    sizes = {"num_experts": experts, "hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    for form, tokens in product(points.formats, points.rows):
        one = expected_distinct(experts, top_k, tokens) * expert_bytes(config, form)
        ids = routed_ids(max(rotation(one, inputs.device), FEWEST), tokens, experts, top_k)
        distinct = sum(each.unique().numel() for each in ids) / len(ids)
        called = experts_call(tokens, dtype=dtype, weight=ROLES.get(form, dtype), top_k=top_k, **sizes)
        work = experts_work(config, tokens, form, distinct)
        build = functools.partial(_experts, inputs, ids, form)
        yield Case(EXPERTS, f"{form} of {experts} tokens={tokens}", *called, work, build)


def routed_ids(sets: int, tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """ids [sets, tokens, k] of uniform independent routing.

    Single tokens of consecutive sets take disjoint experts as long as there are any, so that a rotation reads other
    weights in every call.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokens == 1 and sets * top_k <= experts:
        return torch.randperm(experts, generator=generator)[: sets * top_k].view(sets, 1, top_k)
    return torch.rand(sets, tokens, experts, generator=generator).topk(top_k, dim=-1).indices


def _experts(inputs: Inputs, ids: torch.Tensor, form: str, kernel: str) -> Calls:
    """Calls of a rotation; each has the weights of another layer, up to LAYERS, as a model's layers have.

    One layer's weights are larger than the cache already. But their addresses fit the tables that translate them, and
    a model's addresses do not.
    """
    config, (tokens, top_k) = inputs.config, ids.shape[1:]
    layers = min(LAYERS, len(ids)) if inputs.device.type == "cuda" else 1
    sizes = config.num_local_experts, config.hidden_size, config.intermediate_size
    name = ROLES.get(form, str(inputs.dtype).removeprefix("torch."))
    drawn = (random_experts(name, inputs.dtype, inputs.generator, *sizes) for _ in range(layers))
    stack = [moe.prepare_experts(weights, top_k=top_k, kernel=kernel) for weights in drawn]
    calls: Calls = []
    for number, each in enumerate(ids.to(inputs.device)):
        hidden = inputs.normal(tokens, config.hidden_size)
        share = torch.softmax(torch.randn(tokens, top_k, device=inputs.device), dim=-1)
        calls.append(functools.partial(moe.expert_mlp, hidden, stack[number % layers], share, each))
    return calls


def _described(operation: Operation, inputs: Inputs, rows: int) -> tuple[Described, Work]:
    """How a call of one of the other operations is described, and its work."""
    sizes, dtype, weight = inputs.sizes, inputs.dtype, inputs.empty
    # the residual stream is float32: one reader of it and its norm
    stream = Work(activation_bytes=rows * sizes.hidden * (FP32_BYTES + BF16_BYTES))
    if operation == QKV:
        called = qkv_call(rows, dtype, weight(sizes.packed, sizes.hidden), dtype, sizes.head_dim)
        keys = Work(kv_bytes=rows * kv_bytes_per_token(inputs.config))
        return called, linear_work(rows, sizes.hidden, sizes.packed) + keys
    if operation == OUTPUT:
        return output_call(rows, dtype, weight(sizes.hidden, sizes.query)), linear_work(rows, sizes.query, sizes.hidden)
    if operation == ROUTER:
        work = linear_work(rows, sizes.hidden, sizes.experts) + stream
        return router_call(rows, dtype, weight(sizes.experts, sizes.hidden)), work
    if operation == LOGITS:
        called = logits_call(rows, dtype, weight(sizes.vocab, sizes.hidden))
        return called, linear_work(rows, sizes.hidden, sizes.vocab)
    if operation == ADD_NORM:  # both inputs read, the sum and its norm written
        return (signature(hidden=dtype), {}), stream + stream
    return (signature(logits=dtype), {}), Work(activation_bytes=rows * sizes.vocab * BF16_BYTES)


DENSE = {
    QKV: dense.qkv,
    OUTPUT: dense.output,
    ROUTER: dense.router,
    ADD_NORM: dense.add_norm,
    LOGITS: dense.logits,
    GREEDY: dense.greedy,
}


def dense_cases(operation: Operation, inputs: Inputs, points: Points) -> Iterator[Case]:
    """One of these operations for every number of rows; each set of a rotation has separate tensors."""

    def build(rows: int, sets: int, kernel: str) -> Calls:
        run = DENSE[operation]
        calls = [functools.partial(run, **inputs.dense(operation, rows), kernel=kernel) for _ in range(sets)]
        if operation == LOGITS:  # into a buffer, as the engine does
            out = torch.empty(rows, inputs.sizes.vocab, device=inputs.device, dtype=inputs.dtype)
            calls = [functools.partial(call, out=out) for call in calls]
        return calls

    for rows in points.rows:
        called, work = _described(operation, inputs, rows)
        sets = rotation(work.bytes, inputs.device)
        yield Case(operation, f"rows={rows}", *called, work, functools.partial(build, rows, sets))


CASES: dict[str, Callable[[Inputs, Points], Iterator[Case]]] = {
    PAGED.name: paged_cases,
    WRITE_KV.name: write_cases,
    EXPERTS.name: experts_cases,
    ROUTE.name: route_cases,
    packed.EXPAND.name: expand_cases,
    **{each.name: functools.partial(dense_cases, each) for each in DENSE},
}
