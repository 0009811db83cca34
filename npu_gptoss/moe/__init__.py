"""Routing and the routed experts of one layer: the public ops.

`reference.py` defines them; the other modules are solutions. A kernel may own a layout of the weights: its `prepare` is
called once at load by `prepare_experts`, and every later call gets what it returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import SelectedKernel, select_kernel, signature
from npu_gptoss.moe import ascend, reference, small_ops  # noqa: F401  (registers their kernels)
from npu_gptoss.moe.activation import LIMIT, SWIGLUOAI, activation_name
from npu_gptoss.moe.operations import EXPERTS, ROUTE
from npu_gptoss.moe.weights import ExpertWeights

__all__ = ["ExpertWeights", "PreparedExperts", "expert_mlp", "prepare_experts", "route"]


@dataclass(frozen=True)
class PreparedExperts:
    """A layer's experts in the layout of the kernel that was selected for them."""

    kernel: SelectedKernel
    weights: Any
    hidden_size: int
    swiglu_limit: float


def route(router_logits: torch.Tensor, top_k: int, *, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token: the `top_k` largest logits, weighted by a softmax over those k in fp32.

    router_logits: [tokens, experts]. Returns weights [tokens, top_k] float32, which sum to 1, and ids [tokens, top_k]
    int64 or int32, largest logit first.
    """
    if router_logits.dim() != 2 or not 1 <= top_k <= router_logits.shape[1]:
        raise InputError(
            f"router_logits must be [tokens, experts] with at least {top_k} experts, got {list(router_logits.shape)}"
        )
    run = select_kernel(ROUTE, signature(logits=router_logits.dtype), {}, override=kernel)
    return run(logits=router_logits, top_k=top_k)


def prepare_experts(
    weights: ExpertWeights,
    *,
    activation: object = SWIGLUOAI,
    swiglu_limit: float = LIMIT,
    kernel: str | None = None,
) -> PreparedExperts:
    """Selects the kernel of a layer's experts and brings the weights into its layout; once, at load.

    activation: "swigluoai" or an enum member of that value; anything else raises.
    """
    run = select_kernel(
        EXPERTS,
        signature(hidden=weights.gate_up_proj.dtype, weight=weights.gate_up_proj.dtype),
        {"activation": activation_name(activation), "expert_parallel": weights.expert_map is not None},
        override=kernel,
    )
    prepare = run.kernel.prepare
    return PreparedExperts(
        run, prepare(weights, swiglu_limit) if prepare else weights, weights.hidden_size, swiglu_limit
    )


def expert_mlp(
    hidden_states: torch.Tensor,
    prepared: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the routed experts' outputs: see `reference` for the formula.

    hidden_states: [tokens, hidden]. topk_weights, topk_ids: [tokens, k] from `route`, ids of the global experts.
    Returns [tokens, hidden] in the dtype of hidden_states: the local experts' share, before any all-reduce.
    """
    if hidden_states.dim() != 2 or hidden_states.shape[1] != prepared.hidden_size:
        raise InputError(f"hidden_states must be [tokens, {prepared.hidden_size}], got {list(hidden_states.shape)}")
    if topk_ids.shape != topk_weights.shape or topk_ids.shape[0] != hidden_states.shape[0]:
        raise InputError(
            f"topk_weights and topk_ids must both be [{hidden_states.shape[0]}, k], "
            f"got {list(topk_weights.shape)} and {list(topk_ids.shape)}"
        )
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    return prepared.kernel(
        hidden_states=hidden_states,
        weights=prepared.weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        swiglu_limit=prepared.swiglu_limit,
    )
