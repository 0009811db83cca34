"""Test inputs of the experts and their router: random weights in each format, rows, and a rank's share."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from npu_gptoss.moe import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts, mxfp4, quantize_fp8
from npu_gptoss.moe.activation import LIMIT

TOP_K = 4
NUM_EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 96


def random_experts(
    weight_format: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    experts: int = NUM_EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INTERMEDIATE,
) -> AnyExperts:
    """Gate and up reach beyond the clamp of 7 for a visible share; biases are as large as the products."""

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=generator.device).normal_(0.0, std, generator=generator)

    wide, narrow = 4 * hidden**-0.5, inner**-0.5
    biases = {"gate_up_proj_bias": normal(experts, 2 * inner, std=4), "down_proj_bias": normal(experts, hidden)}
    if weight_format == "mxfp4":
        gate_up = random_mxfp4((experts, 2 * inner, hidden), wide, generator)
        down = random_mxfp4((experts, hidden, inner), narrow, generator)
        names = ("gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales")
        return Mxfp4Experts(**dict(zip(names, (*gate_up, *down), strict=True)), **biases)
    matrices = normal(experts, hidden, 2 * inner, std=wide), normal(experts, inner, hidden, std=narrow)
    floats = ExpertWeights(matrices[0], down_proj=matrices[1], **biases)
    if weight_format == Fp8Experts.format:
        return quantize_fp8(floats)
    matrices = {n: getattr(floats, n).to(getattr(torch, weight_format)) for n in ("gate_up_proj", "down_proj")}
    return dataclasses.replace(floats, **matrices)


# E8M0 bytes of 2 ** -7 and 2 ** -6: normal weights of STD reach 2.3 and 4.7 deviations under them, as trained ones do
STD, SCALES = 0.02, (120, 121)
EXPERTS_AT_ONCE = 8  # bounds the memory that drawing them takes


def scales_of(std: float) -> tuple[int, ...]:
    """SCALES moved by whole powers of two, so that weights of another deviation have codes that are spread alike."""
    return tuple(scale + round(math.log2(std / STD)) for scale in SCALES)


def random_mxfp4(
    shape: tuple[int, int, int], std: float, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values rounded to E2M1 under a drawn scale a group: blocks [..., groups, 16], scales [..., groups].

    shape: [experts, rows, columns], of which a few experts are drawn at once.
    """
    (experts, rows, columns), device = shape, generator.device
    choice = torch.tensor(scales_of(std), device=device, dtype=torch.uint8)
    steps = torch.tensor(mxfp4.E2M1, device=device)
    parts = []
    for first in range(0, experts, EXPERTS_AT_ONCE):
        groups = (min(EXPERTS_AT_ONCE, experts - first), rows, columns // mxfp4.GROUP)
        scales = choice[torch.randint(0, len(choice), groups, generator=generator, device=device)]
        values = torch.randn((*groups, mxfp4.GROUP), generator=generator, device=device)
        values *= std * torch.exp2(127.0 - scales[..., None].float())
        sizes = torch.bucketize(values.abs(), (steps[1:] + steps[:-1]) / 2).to(torch.uint8)
        codes = sizes | torch.signbit(values).to(torch.uint8) << 3
        parts.append((codes[..., 0::2] | (codes[..., 1::2] << 4), scales))
    blocks, scales = (torch.cat(halves) for halves in zip(*parts, strict=True))
    return blocks, scales


def expert_map(experts: int, first: int, last: int) -> torch.Tensor:
    """[experts]: the place of each of [first, last) on a rank that holds these, -1 for the others."""
    places = torch.full((experts,), -1)
    places[first:last] = torch.arange(last - first)
    return places


def local_share(weights: AnyExperts, first: int, last: int) -> AnyExperts:
    """The experts [first, last) as one rank of an expert-parallel group holds them."""
    parts = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights) if f.name != "expert_map"}
    places = expert_map(weights.num_experts, first, last)
    return dataclasses.replace(weights, **{n: t[first:last] for n, t in parts.items()}, expert_map=places)


def expert_inputs(
    weight_format: str,
    dtype: torch.dtype,
    generator: torch.Generator,
    tokens: int,
    *,
    top_k: int = TOP_K,
    share: tuple[int, int] | None = None,
    same: bool = False,
    padding: bool = False,
    **sizes: int,
) -> dict[str, Any]:
    """The arguments of `expert_mlp`, and the logits that they follow from.

    share: the experts that are here. same: every token goes to the first experts. padding: every third token is a
    padding row with ids of -1. sizes: of `random_experts`.
    """
    weights = random_experts(weight_format, dtype, generator, **sizes)
    logits = torch.randn(tokens, weights.num_experts, generator=generator)
    if same:
        logits[:, :top_k] += 50
    values, ids = logits.topk(top_k, dim=-1)
    routing = torch.softmax(values, -1)
    states = torch.randn(tokens, weights.hidden_size, generator=generator).to(dtype)
    if padding:
        ids[::3], routing[::3], states[::3] = -1, 0.0, math.nan
    return {
        "hidden_states": states,
        "weights": weights if share is None else local_share(weights, *share),
        "topk_weights": routing,
        "topk_ids": ids,
        "logits": logits,
        "swiglu_limit": LIMIT,
    }


def chosen(logits: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """A routing as it is compared: bf16 logits tie, and then either expert is right, so the logits that were chosen,
    and how many experts are distinct."""
    inside = ids.long().clamp(0, logits.shape[1] - 1)
    marks = torch.zeros(logits.shape, dtype=torch.int32, device=logits.device).scatter_(1, inside, 1)
    found = torch.where(inside == ids, logits.float().gather(1, inside), float("nan"))
    return {"weights": weights, "logits": found, "distinct": marks.sum(-1)}
