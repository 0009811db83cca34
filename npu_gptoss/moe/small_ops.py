"""Routing and experts on plain torch ops, for any device: the served kernels on CPU, the baseline on NPU and GPU.

Token copies are sorted by expert, so that each expert's rows lie together and the two projections are grouped matrix
products. Biases, activation and the weighted sum stay in fp32.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel
from npu_gptoss.moe.activation import SWIGLUOAI, swigluoai
from npu_gptoss.moe.operations import EXPERTS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights

# Recent torch has it for CPU. Older ones, and devices where it takes some shapes only, loop over the experts.
_grouped_mm = getattr(F, "grouped_mm", None)


def grouped_matmul(rows: torch.Tensor, weight: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """rows [n, in] sorted by group, weight [groups, in, out], counts [groups] -> [n, out].

    Rows past sum(counts) belong to no group; what stands there in the result is undefined.
    """
    on_cpu = rows.device.type == "cpu"
    widened = on_cpu and rows.dtype == torch.bfloat16 and not _multiplies_bfloat16()
    if on_cpu and not widened and _grouped_mm is not None and _aligned(rows) and _aligned(weight):
        return _grouped_mm(rows, weight, offs=counts.cumsum(0).to(torch.int32))
    out = rows.new_empty(rows.shape[0], weight.shape[2])
    start = 0
    for group, count in enumerate(counts.tolist()):
        if count:
            part = slice(start, start + count)
            if widened:
                out[part] = rows[part].float() @ weight[group].float()
            else:
                torch.mm(rows[part], weight[group], out=out[part])
            start += count
    return out


@functools.cache
def _multiplies_bfloat16() -> bool:
    """True when oneDNN multiplies bfloat16 here. Where it cannot, torch's own loop takes 30 times as long as
    float32."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _aligned(matrices: torch.Tensor) -> bool:
    """True when torch's grouped product takes the rows: they start at multiples of 16 bytes."""
    return all(stride == 1 or stride * matrices.element_size() % 16 == 0 for stride in matrices.stride())


@register_kernel(ROUTE, solution="small_ops", signatures=(accepts(logits=WEIGHT_DTYPES),), priority=Priority.PORTABLE)
def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.topk, fp32 softmax over the k."""
    values, ids = torch.topk(logits, top_k, dim=-1)
    return torch.softmax(values, dim=-1, dtype=torch.float32), ids


def prepare(weights: AnyExperts, swiglu_limit: float) -> ExpertWeights:
    """Packed formats are expanded to the dtype of the activations; floats stay unchanged."""
    return weights.expand(weights.dtype)


@register_kernel(
    EXPERTS,
    solution="small_ops",
    signatures=(
        accepts(hidden="float32", weight=("float32", *PACKED_FORMATS)),
        accepts(hidden="bfloat16", weight=("bfloat16", *PACKED_FORMATS)),
    ),
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY},
    priority=Priority.PORTABLE,
    prepare=prepare,
)
def expert_mlp(
    hidden_states: torch.Tensor,
    weights: ExpertWeights,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """Sorted rows, two grouped matrix products, fp32 in between."""
    dtype, (tokens, top_k) = hidden_states.dtype, topk_ids.shape
    expert = weights.local_ids(topk_ids).flatten()
    # Experts of other ranks, and padding, sort behind the local ones, where no group reaches.
    expert = torch.where(expert < 0, weights.num_experts, expert)
    order = torch.argsort(expert)
    sorted_expert = expert[order]
    counts = torch.bincount(sorted_expert, minlength=weights.num_experts)[: weights.num_experts]
    bias_row = sorted_expert.clamp(max=weights.num_experts - 1)

    rows = hidden_states[order // top_k]
    gate_up = grouped_matmul(rows, weights.gate_up_proj, counts).float() + weights.gate_up_proj_bias[bias_row].float()
    inner = swigluoai(gate_up, swiglu_limit).to(dtype)
    down = grouped_matmul(inner, weights.down_proj, counts).float() + weights.down_proj_bias[bias_row].float()
    # Rows of other ranks and of padding were never computed: replaced, not multiplied by zero, since 0 * NaN is NaN.
    down = torch.where((sorted_expert < weights.num_experts)[:, None], down, 0.0)
    unsorted = torch.empty_like(down)
    unsorted[order] = down
    return (unsorted.view(tokens, top_k, -1) * topk_weights[..., None]).sum(1).to(dtype)
