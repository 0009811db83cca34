"""The calls that `bench kernel` times: every operation at gpt-oss's shapes.

Inputs are drawn on the device, in the dtype that is measured: `verify.cases` draws small ones in fp32 on the CPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from npu_gptoss import dense, moe
from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, paged_attention, paged_call, write_kv_cache
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.attention.padding import with_slack
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.random_checkpoint import STD, random_mxfp4
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
from npu_gptoss.model.rope import cos_sin_cache
from npu_gptoss.moe import mxfp4, packed
from npu_gptoss.moe.operations import EXPERTS, ROUTE, experts_call

Calls = list[Callable[[], object]]
LAYERS = 8  # whose experts a rotation walks over on a GPU, where a step is small
FEWEST = 8  # calls of a rotation of experts
ROLES = {"mxfp4": moe.Mxfp4Experts.format, "fp8": moe.Fp8Experts.format}  # what a kernel's weight role calls them


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
    """What is measured: sizes of decode batches, keys of each request, tokens of prompts, formats of the experts."""

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
    """Draws random tensors of one model's shapes."""

    config: GptOssConfig
    device: torch.device
    dtype: torch.dtype
    block_size: int = 16

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(0.0, std)

    def queries(self, rows: int) -> torch.Tensor:
        return self.normal(rows, self.config.num_attention_heads, self.config.head_dim)

    def caches(self, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (blocks, self.block_size, self.config.num_key_value_heads, self.config.head_dim)
        return self.normal(*shape), self.normal(*shape)

    def blocks(self, count: int) -> torch.Tensor:
        """Their numbers in random order."""
        return torch.randperm(count, device=self.device).to(torch.int32)

    def one_token_each(self, requests: int) -> AttentionMetadata:
        """The first token of each request, in a block of its own."""
        table = self.blocks(requests)[:, None]
        slots = table[:, 0].long() * self.block_size
        return AttentionMetadata(tuple(range(requests + 1)), (1,) * requests, table, slots)


def paged_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Decode at every context and batch, prefill of every prompt; each as a full layer and as a window layer."""
    config = inputs.config
    windows = {"full": None, "window": config.sliding_window}
    on_meta = Inputs(config, torch.device("meta"), inputs.dtype, inputs.block_size)
    query, cache = on_meta.queries(1), on_meta.caches(1)[0]
    for context, batch, (kind, window) in product(points.contexts, points.batches, windows.items()):
        work = attention_decode_work(config, [context] * batch, window)
        build = functools.partial(_decode, inputs, rotation(work.kv_bytes, inputs.device), batch, context, window)
        called = paged_call(1, query, cache, query, window)
        yield Case(PAGED, f"decode {kind} ctx={context} B={batch}", *called, work, build)
    for tokens, (kind, window) in product(points.prompts, windows.items()):
        # queries and results count as bytes
        rows = Work(activation_bytes=2 * tokens * config.num_attention_heads * config.head_dim * BF16_BYTES)
        work = attention_prefill_work(config, tokens, window) + rows
        called = paged_call(tokens, query, cache, query, window)
        yield Case(
            PAGED, f"prefill {kind} {tokens}", *called, work, functools.partial(_prefill, inputs, tokens, window)
        )


def _decode(inputs: Inputs, sets: int, batch: int, context: int, window: int | None, kernel: str) -> Calls:
    """Every call reads other blocks of one cache, scattered over it; lengths are on the device, as in a graph."""
    size = inputs.block_size
    blocks = math.ceil(context / size)
    caches = inputs.caches(sets * batch * blocks)
    attend = _attend(inputs, window, kernel)
    calls: Calls = []
    for table in inputs.blocks(sets * batch * blocks).view(sets, batch, blocks):
        metadata = DecodeMetadata(
            lengths=torch.full((batch,), context, device=inputs.device, dtype=torch.int32),
            block_table=table,
            slot_mapping=table[:, -1].long() * size + (context - 1) % size,
            max_seq_len=context,
        )
        query = inputs.queries(batch)
        calls.append(functools.partial(attend, query, *caches, metadata, out=torch.empty_like(query)))
    return calls


def _prefill(inputs: Inputs, tokens: int, window: int | None, kernel: str) -> Calls:
    """One prompt from an empty cache; its keys and values lie in the cache already."""
    size = inputs.block_size
    blocks = math.ceil(tokens / size)
    table = inputs.blocks(blocks)[None]
    positions = torch.arange(tokens, device=inputs.device)
    slots = table[0].long()[positions // size] * size + positions % size
    metadata, query = AttentionMetadata((0, tokens), (tokens,), table, slots), inputs.queries(tokens)
    attend = _attend(inputs, window, kernel)
    return [functools.partial(attend, query, *inputs.caches(blocks), metadata, out=torch.empty_like(query))]


def _attend(inputs: Inputs, window: int | None, kernel: str) -> Callable[..., torch.Tensor]:
    sinks, scale = with_slack(inputs.normal(inputs.config.num_attention_heads)), inputs.config.head_dim**-0.5
    return functools.partial(paged_attention, sinks=sinks, scale=scale, sliding_window=window, kernel=kernel)


def write_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The keys and values of a step's rows into the cache, each row into a block of its own."""
    config, dtype = inputs.config, inputs.dtype
    traits = {"head_dim": config.head_dim, "block_size": inputs.block_size}

    def build(rows: int, kernel: str) -> Calls:
        new = [inputs.normal(rows, config.num_key_value_heads, config.head_dim) for _ in range(2)]
        metadata = inputs.one_token_each(rows)
        return [functools.partial(write_kv_cache, *new, *inputs.caches(rows), metadata, kernel=kernel)]

    for rows in points.rows:
        work = Work(kv_bytes=2 * rows * kv_bytes_per_token(config))  # read once, written once
        called = signature(key=dtype, kv=dtype), traits
        yield Case(WRITE_KV, f"rows={rows}", *called, work, functools.partial(build, rows))


def route_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The top-k of a step's router logits."""
    experts, top_k = inputs.config.num_local_experts, inputs.config.num_experts_per_tok

    def build(rows: int, kernel: str) -> Calls:
        return [functools.partial(moe.route, inputs.normal(rows, experts), top_k, kernel=kernel)]

    for rows in points.rows:
        work = Work(activation_bytes=rows * (experts * BF16_BYTES + top_k * 8))
        called = signature(logits=inputs.dtype), {}
        yield Case(ROUTE, f"rows={rows} of {experts}", *called, work, functools.partial(build, rows))


def expand_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Gate and up of the experts that so many tokens touch at most, from packed MXFP4 to a ring in bfloat16."""
    config = inputs.config
    experts, columns, depth = config.num_local_experts, 2 * config.intermediate_size, config.hidden_size

    def build(slots: int, kernel: str) -> Calls:
        generator = torch.Generator(device=inputs.device).manual_seed(0)
        drawn = random_mxfp4((experts, columns, depth), STD, generator, inputs.device)
        weights = packed.pack(*drawn, halves=True)
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

    Single tokens of consecutive sets take disjoint experts for as long as there are any, so that a rotation reads
    other weights in every call.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokens == 1 and sets * top_k <= experts:
        return torch.randperm(experts, generator=generator)[: sets * top_k].view(sets, 1, top_k)
    return torch.rand(sets, tokens, experts, generator=generator).topk(top_k, dim=-1).indices


def _experts(inputs: Inputs, ids: torch.Tensor, form: str, kernel: str) -> Calls:
    """Calls of a rotation; each has the weights of another layer, up to LAYERS, as a model's layers have.

    One layer's weights are larger than the cache already; but their addresses fit the tables that translate them, and
    a model's do not.
    """
    tokens, top_k = ids.shape[1:]
    layers = min(LAYERS, len(ids)) if inputs.device.type == "cuda" else 1
    stack = [moe.prepare_experts(random_experts(inputs, form), top_k=top_k, kernel=kernel) for _ in range(layers)]
    calls: Calls = []
    for number, each in enumerate(ids.to(inputs.device)):
        hidden = inputs.normal(tokens, inputs.config.hidden_size)
        share = torch.softmax(torch.randn(tokens, top_k, device=inputs.device), dim=-1)
        calls.append(functools.partial(moe.expert_mlp, hidden, stack[number % layers], share, each))
    return calls


def random_experts(inputs: Inputs, form: str) -> moe.AnyExperts:
    """One layer's experts, normal weights: mxfp4, fp8, or for bf16 whatever the dtype is."""
    config = inputs.config
    experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    normal = functools.partial(inputs.normal, experts, std=STD)
    biases = {"gate_up_proj_bias": normal(2 * inner), "down_proj_bias": normal(hidden)}
    if form == "bf16":
        return moe.ExpertWeights(normal(hidden, 2 * inner), down_proj=normal(inner, hidden), **biases)
    generator = torch.Generator(device=inputs.device).manual_seed(0)
    gate_up, down = (
        random_mxfp4((experts, rows, columns), STD, generator, inputs.device)
        for rows, columns in ((2 * inner, hidden), (hidden, inner))
    )
    official = moe.Mxfp4Experts(gate_up[0], gate_up[1], biases["gate_up_proj_bias"], *down, biases["down_proj_bias"])
    return official if form == "mxfp4" else moe.quantize_fp8(official)


@dataclass(frozen=True)
class Dense:
    """How one of the other operations is described, what it must do, and what makes a call without its kernel."""

    called: Described
    work: Work
    make: Callable[[], functools.partial[object]]


def _dense(inputs: Inputs, rows: int) -> dict[Operation, Dense]:
    """What a layer computes besides attention and experts."""
    config, dtype, device, normal, partial = (
        inputs.config,
        inputs.dtype,
        inputs.device,
        inputs.normal,
        functools.partial,
    )
    hidden, experts, vocabulary = config.hidden_size, config.num_local_experts, config.vocab_size
    query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    projected = query + 2 * kv
    states, draw = partial(normal, rows), partial(normal, std=STD)
    # the residual stream is float32; a reader of it and what it norms
    stream = Work(activation_bytes=rows * hidden * (FP32_BYTES + BF16_BYTES))

    def residual() -> torch.Tensor:
        return states(hidden).float()

    cached = Inputs(config, device, dtype)  # in blocks of 16

    def weight(*shape: int) -> torch.Tensor:
        """As its shape alone."""
        return torch.empty(shape, device="meta", dtype=dtype)

    def norm() -> tuple[torch.Tensor, float]:
        return torch.ones(hidden, device=device), config.rms_norm_eps

    def angles() -> tuple[torch.Tensor, torch.Tensor]:
        return _cos_sin(config, device), torch.randint(0, 1024, (rows,), device=device)

    def qkv() -> functools.partial[object]:
        drawn = residual(), states(hidden), *norm(), draw(projected, hidden), draw(projected), *angles()
        return partial(dense.qkv, *drawn, *cached.caches(rows), cached.one_token_each(rows))

    def router() -> functools.partial[object]:
        weights = draw(experts, hidden), draw(experts)
        return partial(dense.router, residual(), None, *norm(), *weights, config.num_experts_per_tok)

    def logits() -> functools.partial[object]:
        out = torch.empty(rows, vocabulary, device=device, dtype=dtype)
        return partial(dense.logits, states(hidden), draw(vocabulary, hidden), out=out)

    return {
        QKV: Dense(
            qkv_call(rows, dtype, weight(projected, hidden), dtype, config.head_dim),
            linear_work(rows, hidden, projected) + Work(kv_bytes=rows * kv_bytes_per_token(config)),
            qkv,
        ),
        OUTPUT: Dense(
            output_call(rows, dtype, weight(hidden, query)),
            linear_work(rows, query, hidden),
            lambda: partial(dense.output, states(query), draw(hidden, query), draw(hidden), residual()),
        ),
        ROUTER: Dense(
            router_call(rows, dtype, weight(experts, hidden)), linear_work(rows, hidden, experts) + stream, router
        ),
        ADD_NORM: Dense(
            (signature(hidden=dtype), {}),
            stream + stream,  # both inputs read, the sum and its norm written
            lambda: partial(dense.add_norm, residual(), states(hidden), *norm(), dtype),
        ),
        LOGITS: Dense(
            logits_call(rows, dtype, weight(vocabulary, hidden)),
            linear_work(rows, hidden, vocabulary),
            logits,
        ),
        GREEDY: Dense(
            (signature(logits=dtype), {}),
            Work(activation_bytes=rows * vocabulary * BF16_BYTES),
            lambda: partial(dense.greedy, states(vocabulary)),
        ),
    }


@functools.lru_cache(maxsize=1)
def _cos_sin(config: GptOssConfig, device: torch.device) -> torch.Tensor:
    """Of the first positions: all that a case turns by."""
    return cos_sin_cache(config, 1024, torch.float32, device)


def dense_cases(operation: Operation, inputs: Inputs, points: Points) -> Iterator[Case]:
    """One of these operations for every number of rows; each set of a rotation has tensors of its own."""

    def calls(found: Dense, kernel: str) -> Calls:
        return [
            functools.partial(found.make(), kernel=kernel) for _ in range(rotation(found.work.bytes, inputs.device))
        ]

    for rows in points.rows:
        found = _dense(inputs, rows)[operation]
        yield Case(operation, f"rows={rows}", *found.called, found.work, functools.partial(calls, found))


CASES: dict[str, Callable[[Inputs, Points], Iterator[Case]]] = {
    PAGED.name: paged_cases,
    WRITE_KV.name: write_cases,
    EXPERTS.name: experts_cases,
    ROUTE.name: route_cases,
    packed.EXPAND.name: expand_cases,
    **{each.name: functools.partial(dense_cases, each) for each in (QKV, OUTPUT, ROUTER, ADD_NORM, LOGITS, GREEDY)},
}
