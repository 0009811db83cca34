"""Routing and the routed experts of one layer alone at gpt-oss's shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch

from npu_gptoss.bench.kernels import Case
from npu_gptoss.bench.measure import rotation
from npu_gptoss.bench.random_checkpoint import STD, random_mxfp4
from npu_gptoss.bench.roofline import BF16_BYTES, Work, expected_distinct, expert_bytes, experts_work
from npu_gptoss.kernels import signature
from npu_gptoss.model.config import GptOssConfig
from npu_gptoss.moe import (
    AnyExperts,
    ExpertWeights,
    Fp8Experts,
    Mxfp4Experts,
    expert_mlp,
    prepare_experts,
    quantize_fp8,
    route,
)
from npu_gptoss.moe.operations import EXPERTS, ROUTE, experts_call

Calls = list[Callable[[], object]]
LAYERS = 8  # whose weights a rotation walks over on a GPU, where a step is small
FEWEST = 8  # calls of a rotation
ROLES = {"mxfp4": Mxfp4Experts.format, "fp8": Fp8Experts.format}  # what a kernel's weight role calls them


def route_cases(
    config: GptOssConfig, *, batches: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """The top-k of a step's router logits."""
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    for batch in batches:
        work = Work(activation_bytes=batch * (experts * BF16_BYTES + top_k * 8))
        build = functools.partial(_route, batch, experts, top_k, device, dtype)
        yield Case(ROUTE, f"rows={batch} of {experts}", signature(logits=dtype), {}, work, build)


def routed_ids(sets: int, tokens: int, experts: int, top_k: int, seed: int = 0) -> torch.Tensor:
    """ids [sets, tokens, k] of uniform independent routing.

    Single tokens of consecutive sets take disjoint experts for as long as there are any, so that a rotation reads
    other weights in every call.
    """
    generator = torch.Generator().manual_seed(seed)
    if tokens == 1 and sets * top_k <= experts:
        return torch.randperm(experts, generator=generator)[: sets * top_k].view(sets, 1, top_k)
    return torch.rand(sets, tokens, experts, generator=generator).topk(top_k, dim=-1).indices


def _route(rows: int, experts: int, top_k: int, device: torch.device, dtype: torch.dtype, kernel: str) -> Calls:
    logits = torch.randn(rows, experts, device=device, dtype=dtype)
    return [functools.partial(route, logits, top_k, kernel=kernel)]


def experts_cases(
    config: GptOssConfig, *, tokens: Sequence[int], weights: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Iterator[Case]:
    """The experts' MLPs of one layer for every number of tokens and format of the weights."""
    experts, top_k = config.num_local_experts, config.num_experts_per_tok
    for form in weights:
        for count in tokens:
            one = expected_distinct(experts, top_k, count) * expert_bytes(config, form)
            ids = routed_ids(max(rotation(one, device), FEWEST), count, experts, top_k)
            distinct = sum(each.unique().numel() for each in ids) / len(ids)
            yield Case(
                EXPERTS,
                f"{form} of {experts} tokens={count}",
                *experts_call(
                    count,
                    dtype=dtype,
                    weight=ROLES.get(form, dtype),
                    num_experts=experts,
                    hidden_size=config.hidden_size,
                    intermediate_size=config.intermediate_size,
                    top_k=top_k,
                ),
                experts_work(config, count, form, distinct),
                functools.partial(_experts, ids, config, form, device, dtype),
            )


def _experts(
    ids: torch.Tensor, config: GptOssConfig, form: str, device: torch.device, dtype: torch.dtype, kernel: str
) -> Calls:
    """Calls of a rotation; each has the weights of another layer, up to LAYERS, as a model's layers have.

    One layer's weights are larger than the cache already; but their addresses fit the tables that translate them, and
    a model's do not.
    """
    tokens, top_k = ids.shape[1:]
    layers = min(LAYERS, len(ids)) if device.type == "cuda" else 1
    made = (random_experts(config, form, device, dtype) for _ in range(layers))
    stack = [prepare_experts(weights, top_k=top_k, kernel=kernel) for weights in made]
    calls: Calls = []
    for number, each in enumerate(ids.to(device)):
        prepared = stack[number % layers]
        hidden = torch.randn(tokens, config.hidden_size, device=device, dtype=dtype)
        share = torch.softmax(torch.randn(tokens, top_k, device=device), dim=-1)
        calls.append(functools.partial(expert_mlp, hidden, prepared, share, each))
    return calls


def random_experts(config: GptOssConfig, form: str, device: torch.device, dtype: torch.dtype) -> AnyExperts:
    """One layer's experts, normal weights: mxfp4, fp8, or for bf16 whatever the dtype is."""
    experts, hidden, inner = config.num_local_experts, config.hidden_size, config.intermediate_size
    generator = torch.Generator(device=device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype).normal_(0.0, STD, generator=generator)

    biases = {"gate_up_proj_bias": normal(experts, 2 * inner), "down_proj_bias": normal(experts, hidden)}
    if form == "bf16":
        return ExpertWeights(normal(experts, hidden, 2 * inner), down_proj=normal(experts, inner, hidden), **biases)
    blocks = {}
    for name, rows, columns in (("gate_up_proj", 2 * inner, hidden), ("down_proj", hidden, inner)):
        made = [random_mxfp4((rows, columns), STD, generator, device) for _ in range(experts)]
        blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = (torch.stack(halves) for halves in zip(*made, strict=True))
    packed = Mxfp4Experts(**blocks, **biases)
    return packed if form == "mxfp4" else quantize_fp8(packed)
