"""The calls that `bench kernel` times: every operation at gpt-oss's shapes, with inputs of `verify`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from npu_gptoss import attention, dense, moe
from npu_gptoss.attention.operations import PAGED, WRITE_KV
from npu_gptoss.bench import roofline
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.roofline import BF16_BYTES, FP32_BYTES, Work, kv_bytes_per_token, linear_work
from npu_gptoss.dense import operations as dense_operations
from npu_gptoss.dense.operations import ADD_NORM, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN
from npu_gptoss.kernels import Described, Operation, signature
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe import mxfp4, packed
from npu_gptoss.moe.operations import EXPERTS, ROUTE, experts_call, route_call
from npu_gptoss.verify import moe_cases
from npu_gptoss.verify.attention_cases import Shape, Step, as_decode, make_step
from npu_gptoss.verify.dense_cases import DenseInputs, Sizes

Calls = list[Callable[[], object]]
LAYERS = 8  # whose experts a rotation walks over on a GPU, where a step is small
FEWEST = 8  # calls of a rotation of experts
DENSE = {
    operation.mode: operation for operation in (ADD_NORM, GREEDY, LOGITS, OUTPUT, QKV, ROTATE_WRITE, ROUTER, TOKEN)
}
ROLES = {"mxfp4": moe.Mxfp4Experts.format, "fp8": moe.Fp8Experts.format}  # the names of formats in a weight role


@dataclass(frozen=True)
class Case:
    """One operation at one shape. `calls(kernel)` builds the rotation that runs the kernel of that name."""

    operation: Operation
    name: str
    described: Described
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
        """Cases of the operations to which a prompt's token is a row like any other."""
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
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def sizes(self) -> Sizes:
        c = self.config
        heads = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        return Sizes(c.hidden_size, *heads, c.num_local_experts, c.num_experts_per_tok, c.vocab_size)

    @property
    def experts(self) -> tuple[int, int, int]:
        """Their number, the hidden and the intermediate size."""
        return self.config.num_local_experts, self.config.hidden_size, self.config.intermediate_size

    def step(self, requests: Sequence[tuple[int, int]]) -> Step:
        """One attention step in the measured dtype; its blocks are scattered over a separate cache."""
        sizes = self.sizes
        shape = Shape(sizes.heads, sizes.kv_heads, sizes.head_dim, self.block_size)
        return make_step(requests, shape, self.generator).to(self.device, self.dtype)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype).normal_(generator=self.generator)

    def empty(self, *shape: int) -> torch.Tensor:
        """A shape for the description of a call."""
        return torch.empty(shape, device="meta", dtype=self.dtype)


def _rotation(run: Callable[..., object], make: Callable[[], dict[str, Any]], sets: int, kernel: str) -> Calls:
    """Calls of a public operation, each with arguments of its own."""
    return [functools.partial(run, **make(), kernel=kernel) for _ in range(sets)]


def paged_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Decode at every context and batch, prefill of every prompt; each as a full layer and as a window layer.

    A decode reads another cache in each call, with its lengths on the device, as in a graph. A prompt starts from an
    empty cache in which its keys and values lie already; its queries and results count as bytes.
    """
    config, sizes = inputs.config, inputs.sizes
    windows = {"full": None, "window": config.sliding_window}
    query = inputs.empty(1, sizes.heads, sizes.head_dim)
    cache = inputs.empty(1, inputs.block_size, sizes.kv_heads, sizes.head_dim)

    def make(requests: list[tuple[int, int]], window: int | None, context: int) -> dict[str, Any]:
        step = inputs.step(requests)
        step = as_decode(step, context) if context else step
        return {**step.inputs(window), "out": torch.empty_like(step.query)}

    def case(name: str, work: Work, longest: int, window: int | None, sets: int, *made: Any) -> Case:
        described = attention.paged_call(longest, query, cache, query, window)
        build = functools.partial(make, *made)
        return Case(PAGED, name, described, work, functools.partial(_rotation, attention.paged_attention, build, sets))

    for context, batch, (kind, window) in product(points.contexts, points.batches, windows.items()):
        work = roofline.attention_decode_work(config, [context] * batch, window)
        sets = rotation(work.kv_bytes, inputs.device)
        name = f"decode {kind} ctx={context} B={batch}"
        yield case(name, work, 1, window, sets, [(1, context)] * batch, window, context)
    for tokens, (kind, window) in product(points.prompts, windows.items()):
        rows = Work(activation_bytes=2 * tokens * sizes.query * BF16_BYTES)
        work = roofline.attention_prefill_work(config, tokens, window) + rows
        yield case(f"prefill {kind} {tokens}", work, tokens, window, 1, [(tokens, tokens)], window, 0)


def _by_rows(
    operation: Operation,
    run: Callable[..., object],
    make: Callable[[int], dict[str, Any]],
    name: str,
    described: Described,
    work: Mapping[int, Work],
) -> Iterator[Case]:
    """A case for each number of rows, each a single call again and again. name: has a place for the number."""
    for rows, of_rows in work.items():
        calls = functools.partial(_rotation, run, functools.partial(make, rows), 1)
        yield Case(operation, name.format(rows), described, of_rows, calls)


def write_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The keys and values of a step's rows into the cache, one block a row: read once, written once."""
    heads = inputs.sizes.kv_heads, inputs.sizes.head_dim

    def make(rows: int) -> dict[str, Any]:
        step = inputs.step([(1, 1)] * rows)
        caches = {"key_cache": step.key_cache, "value_cache": step.value_cache}
        key, value = (cache.flatten(0, 1)[step.metadata.slot_mapping].clone() for cache in caches.values())
        return {"key": key, "value": value, **caches, "metadata": step.metadata}

    described = attention.write_call(inputs.empty(1, *heads), inputs.empty(1, inputs.block_size, *heads))
    work = {rows: Work(kv_bytes=2 * rows * kv_bytes_per_token(inputs.config)) for rows in points.rows}
    yield from _by_rows(WRITE_KV, attention.write_kv_cache, make, "rows={}", described, work)


def route_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The top-k of a step's router logits."""
    experts, top_k = inputs.sizes.experts, inputs.sizes.top_k

    def make(rows: int) -> dict[str, Any]:
        return {"router_logits": inputs.normal(rows, experts), "top_k": top_k}

    work = {rows: Work(activation_bytes=rows * (experts * BF16_BYTES + top_k * 8)) for rows in points.rows}
    yield from _by_rows(ROUTE, moe.route, make, f"rows={{}} of {experts}", route_call(inputs.dtype), work)


def expand_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """Gate and up of the experts that so many tokens touch at most, from packed MXFP4 to a ring in bfloat16."""
    experts, depth, inner = inputs.experts
    columns = 2 * inner

    def make(slots: int) -> dict[str, Any]:
        return {
            "packed": packed.pack(
                *moe_cases.random_mxfp4((experts, columns, depth), moe_cases.STD, inputs.generator), halves=True
            ),
            "experts": torch.arange(slots, dtype=torch.int32, device=inputs.device),
            "out": torch.empty(slots, depth, columns, dtype=torch.bfloat16, device=inputs.device),
        }

    touched = dict.fromkeys(min(experts, rows * inputs.sizes.top_k) for rows in points.rows)
    work = {slots: Work(expert_bytes=slots * depth * columns * (mxfp4.BITS / 8 + BF16_BYTES)) for slots in touched}
    described = signature(out=torch.bfloat16), {"quarter": packed.rows_of(columns) * columns}
    yield from _by_rows(packed.EXPAND, packed.expand, make, f"{{}} of {experts} experts", described, work)


def experts_cases(inputs: Inputs, points: Points) -> Iterator[Case]:
    """The experts' MLPs of one layer for every format of the weights and number of tokens."""
    (experts, hidden, inner), top_k = inputs.experts, inputs.sizes.top_k
    sizes = {"num_experts": experts, "hidden_size": hidden, "intermediate_size": inner}
    for form, tokens in product(points.formats, points.rows):
        one = roofline.expected_distinct(experts, top_k, tokens) * roofline.expert_bytes(inputs.config, form)
        ids = routed_ids(max(rotation(one, inputs.device), FEWEST), tokens, experts, top_k)
        distinct = sum(each.unique().numel() for each in ids) / len(ids)
        weight = ROLES.get(form, inputs.dtype)
        described = experts_call(tokens, dtype=inputs.dtype, weight=weight, top_k=top_k, **sizes)
        work = roofline.experts_work(inputs.config, tokens, form, distinct)
        build = functools.partial(_experts, inputs, ids, form)
        yield Case(EXPERTS, f"{form} of {experts} tokens={tokens}", described, work, build)


def routed_ids(sets: int, tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """ids [sets, tokens, k] of uniform independent routing.

    Single tokens of consecutive sets take disjoint experts as long as there are any, so that a rotation reads other
    weights in every call.
    """
    generator = torch.Generator().manual_seed(0)
    if tokens == 1 and sets * top_k <= experts:
        return torch.randperm(experts, generator=generator)[: sets * top_k].view(sets, 1, top_k)
    return torch.rand(sets, tokens, experts, generator=generator).topk(top_k, dim=-1).indices


def _experts(inputs: Inputs, ids: torch.Tensor, form: str, kernel: str) -> Calls:
    """Calls of a rotation; each has the weights of another layer, up to LAYERS, as a model's layers have.

    One layer's weights are larger than the cache already. But their addresses fit the tables that translate them, and
    a model's addresses do not.
    """
    tokens, top_k = ids.shape[1:]
    layers = min(LAYERS, len(ids)) if inputs.device.type == "cuda" else 1
    name = ROLES.get(form, inputs.dtype_name)
    drawn = (moe_cases.random_experts(name, inputs.dtype, inputs.generator, *inputs.experts) for _ in range(layers))
    stack = [moe.prepare_experts(weights, top_k=top_k, kernel=kernel) for weights in drawn]
    calls: Calls = []
    for number, each in enumerate(ids.to(inputs.device)):
        hidden = inputs.normal(tokens, inputs.config.hidden_size)
        share = torch.softmax(torch.randn(tokens, top_k, device=inputs.device), dim=-1)
        calls.append(functools.partial(moe.expert_mlp, hidden, stack[number % layers], share, each))
    return calls


def _described(mode: str, inputs: Inputs, rows: int) -> tuple[Described, Work]:
    """Returns the description of a dense operation's call, and its work."""
    sizes, dtype = inputs.sizes, inputs.dtype
    # the residual stream is float32: one reader of it and its norm
    stream = Work(activation_bytes=rows * sizes.hidden * (FP32_BYTES + BF16_BYTES))
    if mode == "add_norm":  # both inputs read, the sum and its norm written
        return (signature(hidden=dtype), {}), stream + stream
    if mode == "greedy":
        return (signature(logits=dtype), {}), Work(activation_bytes=rows * sizes.vocab * BF16_BYTES)
    if mode == "rotate_write":  # queries read and written, keys and values read and stored
        moved = Work(activation_bytes=rows * (sizes.query + sizes.packed) * BF16_BYTES)
        heads = sizes.packed // sizes.head_dim
        call = dense_operations.rotate_write_call(dtype, heads, dtype, sizes.head_dim)
        return call, moved + Work(kv_bytes=rows * kv_bytes_per_token(inputs.config))
    if mode == "token":  # a byte of each weight finds the tokens that can win
        read = Work(dense_bytes=sizes.vocab * sizes.hidden, flops=2 * rows * sizes.vocab * sizes.hidden)
        return dense_operations.CALLS[TOKEN](rows, dtype, inputs.empty(sizes.vocab, sizes.hidden)), read
    size, out, beside = {
        "qkv": (sizes.hidden, sizes.packed, Work(kv_bytes=rows * kv_bytes_per_token(inputs.config))),
        "output": (sizes.query, sizes.hidden, Work()),
        "router": (sizes.hidden, sizes.experts, stream),
        "logits": (sizes.hidden, sizes.vocab, Work()),
    }[mode]
    cache = (dtype, sizes.head_dim) if mode == "qkv" else ()
    described = dense_operations.CALLS[DENSE[mode]](rows, dtype, inputs.empty(out, size), *cache)
    return described, linear_work(rows, size, out) + beside


def dense_cases(mode: str, inputs: Inputs, points: Points) -> Iterator[Case]:
    """A dense operation for every number of rows; each set of a rotation has separate tensors."""

    def make(rows: int) -> dict[str, Any]:
        roles = dict.fromkeys(("hidden", "weight", "qkv", "kv", "logits"), inputs.dtype_name)
        made = DenseInputs(inputs.generator, roles, rows, inputs.sizes, mode not in ("router", "token"), edges=False)
        # logits go into a buffer, as in the engine
        out = torch.empty(rows, inputs.sizes.vocab, device=inputs.device, dtype=inputs.dtype)
        drawn = made.of(DENSE[mode])
        if mode == "token":
            return {**drawn, "shortlist": dense.Shortlist.of(drawn["weight"])}
        return {**drawn, **({"out": out} if mode == "logits" else {})}

    for rows in points.rows:
        described, work = _described(mode, inputs, rows)
        sets, run = rotation(work.bytes, inputs.device), getattr(dense, mode)
        calls = functools.partial(_rotation, run, functools.partial(make, rows), sets)
        yield Case(DENSE[mode], f"rows={rows}", described, work, calls)


CASES: dict[str, Callable[[Inputs, Points], Iterator[Case]]] = {
    PAGED.name: paged_cases,
    WRITE_KV.name: write_cases,
    EXPERTS.name: experts_cases,
    ROUTE.name: route_cases,
    packed.EXPAND.name: expand_cases,
    **{operation.name: functools.partial(dense_cases, mode) for mode, operation in DENSE.items()},
}
