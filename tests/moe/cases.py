"""Random experts and routings, and the check that every kernel must pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gptoss.kernels.signature import dtype_name
from npu_gptoss.moe import AnyExperts, ExpertWeights, expert_mlp, prepare_experts, route
from npu_gptoss.moe.activation import swigluoai
from npu_gptoss.moe.adapters import ExpertAdapters, ExpertPair
from npu_gptoss.moe.triton import tuned
from npu_gptoss.verify.moe_cases import random_experts
from tests.tolerances import assert_close

EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 64, 96, 4


def tiles_of(kernel: str, weight_format: str, tokens: int, pairs: int, experts: int) -> tuple[object, ...]:
    """The tiles of one call of an experts' kernel for CUDA. pairs: of tokens and experts."""
    path = kernel.rpartition(".")[2]
    if path == "gluon_one":
        return (tuned.one_gluon_tiles(),)
    if path == "gluon_few":
        return (tuned.few_gluon_tiles(tokens),)
    if path == "gluon_many":
        return (tuned.gluon_tiles(pairs, experts),)
    return tuned.tiles(weight_format, "many" if path == "triton_many" else "few", tokens)


@dataclass
class Layer:
    hidden_states: torch.Tensor
    logits: torch.Tensor
    weights: ExpertWeights

    def run(self, kernel: str | None = None, weights: ExpertWeights | None = None, **options: object) -> torch.Tensor:
        topk_weights, topk_ids = options.pop("routing", None) or route(self.logits, TOP_K)
        prepared = prepare_experts(weights or self.weights, kernel=kernel, **options)
        return expert_mlp(self.hidden_states, prepared, topk_weights, topk_ids)


def make_layer(tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0, one_expert: bool = False) -> Layer:
    """Experts as `npu-gptoss verify` has them: gate and up beyond the clamp, biases as large as the products."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    logits = normal(tokens, EXPERTS)
    if one_expert:  # every token wants the same four experts, the other four get nothing
        logits[:, :TOP_K] += 50
    weights = random_experts(dtype_name(dtype), dtype, generator, EXPERTS, HIDDEN, INTERMEDIATE)
    return Layer(normal(tokens, HIDDEN), logits, weights)


def close(got: torch.Tensor, want: torch.Tensor, share: int = 256) -> None:
    """In bf16 up to a `share` of the largest result: bf16 rounds the activation and both products (and on some paths
    the slots' results) before four experts cancel in the sum."""
    largest = want.float().abs().max().item() if want.numel() else 0.0
    assert_close(got, want, atol=largest / share if want.dtype == torch.bfloat16 else 0.0)


def check(run: Callable[[Layer], torch.Tensor], layer: Layer, weights: ExpertWeights | None = None) -> None:
    """Raises AssertionError when `run(layer)` differs from the reference for the same inputs."""
    close(run(layer), layer.run("reference", weights))


def adapted(
    weights: AnyExperts,
    adapters: ExpertAdapters,
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    mutation: str = "",
) -> torch.Tensor:
    """The definition of experts with adapters, rows of gate_up in the official order: one slot after the other, in
    fp32. mutation: one of `test_adapters.MUTATIONS`."""
    floats, out = weights.expand(torch.float32), torch.zeros(hidden.shape, device=hidden.device)
    count, experts = adapters.gate_up.a.shape[:2]
    for token, expert in [(token, int(expert)) for token, row in enumerate(topk_ids) for expert in row if expert >= 0]:
        own = int(adapters.of_token[token])
        own = count - 1 - own if mutation == "swapped" and own >= 0 else own
        of = (expert + 1) % experts if mutation == "of another expert" else expert

        def delta(pair: ExpertPair, x: torch.Tensor, own: int = own, of: int = of) -> torch.Tensor:
            added = pair.b[own, of].float() @ (pair.a[own, of].float() @ x)
            return added * (own >= 0 and mutation != "no delta")

        x = hidden[token].float()
        gate_up = x @ floats.gate_up_proj[expert].float() + floats.gate_up_proj_bias[expert].float()
        if mutation == "behind the activation":
            inner = swigluoai(gate_up, 7.0) + delta(adapters.gate_up, x)[::2]
        else:
            inner = swigluoai(gate_up + delta(adapters.gate_up, x), 7.0)
        weight = topk_weights[token, topk_ids[token] == expert]
        down = inner @ floats.down_proj[expert].float() + floats.down_proj_bias[expert].float()
        out[token] += down * weight + delta(adapters.down, inner) * (1 if mutation == "behind the weight" else weight)
    return out.to(hidden.dtype)
