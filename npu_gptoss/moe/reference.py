"""The definition of routing and of the experts, in fp32: compare it with the model card.

    weights, ids = top-k of the router logits;  weights = softmax(weights)      (over the k, not over all experts)
    expert(x)    = swigluoai(x @ gate_up + gate_up_bias) @ down + down_bias
    out          = sum over the k of weight * expert(x)

(openai/gpt-oss `gpt_oss/torch/model.py`, MLPBlock.)
"""

from __future__ import annotations

import torch

from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel
from npu_gptoss.moe.activation import SWIGLUOAI, swigluoai
from npu_gptoss.moe.operations import EXPERTS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights


@register_kernel(ROUTE, solution="reference", signatures=(accepts(logits=WEIGHT_DTYPES),), priority=Priority.REFERENCE)
def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The definition: full sort, fp32 softmax over the k."""
    ids = torch.argsort(logits.float(), dim=-1, descending=True, stable=True)[:, :top_k]
    return torch.softmax(logits.float().gather(1, ids), dim=-1), ids


def prepare(weights: AnyExperts, swiglu_limit: float) -> ExpertWeights:
    """Packed formats are expanded to fp32."""
    return weights.expand(torch.float32)


@register_kernel(
    EXPERTS,
    solution="reference",
    signatures=(accepts(hidden=WEIGHT_DTYPES, weight=(*WEIGHT_DTYPES, *PACKED_FORMATS)),),
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY},
    priority=Priority.REFERENCE,
    prepare=prepare,
)
def expert_mlp(
    hidden_states: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """The definition: one expert after the other in fp32."""
    out = torch.zeros(hidden_states.shape, dtype=torch.float32, device=hidden_states.device)
    local = weights.local_ids(topk_ids)
    for expert in range(weights.num_experts):
        token, slot = torch.nonzero(local == expert, as_tuple=True)
        if not len(token):
            continue
        x = hidden_states[token].float()
        gate_up = x @ weights.gate_up_proj[expert].float() + weights.gate_up_proj_bias[expert].float()
        y = (
            swigluoai(gate_up, swiglu_limit) @ weights.down_proj[expert].float()
            + weights.down_proj_bias[expert].float()
        )
        out.index_add_(0, token, y * topk_weights[token, slot].float()[:, None])
    return out.to(hidden_states.dtype)
