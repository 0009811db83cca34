"""Roles and traits of the MoE family's calls, which every kernel must declare."""

from __future__ import annotations

from typing import Any

import torch

from npu_gptoss.kernels import Described, define_operation, signature
from npu_gptoss.moe.activation import SWIGLUOAI
from npu_gptoss.moe.weights import AnyExperts

WEIGHT_DTYPES = ("float32", "bfloat16")
PACKED_FORMATS = ("mxfp4", "float8_e4m3fn")
TOP_K = 4  # of gpt-oss
FEW_ROWS = 256  # of a decode batch; more rows are a prefill, and have kernels of their own

ROUTE = define_operation(
    "moe", "route", roles=("logits",), summary="top-k of the router logits, softmax over the k in fp32"
)
EXPERTS = define_operation(
    "moe",
    "experts",
    roles=("hidden", "weight"),
    traits=("activation", "expert_parallel"),
    # pairs_per_expert: of (token, expert) pairs, an expert's share if all of all ranks get as many
    sizes=("rows", "pairs_per_expert", "hidden_size", "intermediate_size"),
    summary="the routed experts' MLPs with biases and the clamped SwiGLU, summed by routing weight",
)


def route_call(logits: torch.dtype) -> Described:
    """Describes a call of moe.route."""
    return signature(logits=logits), {}


def experts_call(
    rows: int,
    *,
    dtype: torch.dtype,
    weight: object,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    top_k: int = TOP_K,
    activation: str = SWIGLUOAI,
    expert_parallel: bool = False,
) -> Described:
    """Describes a call of moe.experts. weight: format or dtype; num_experts: of all ranks together."""
    return signature(hidden=dtype, weight=weight), {
        "activation": activation,
        "expert_parallel": expert_parallel,
        "rows": rows,
        "pairs_per_expert": rows * top_k / num_experts,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }


def described(weights: AnyExperts) -> dict[str, Any]:
    """The arguments of `experts_call` for a layer's weights."""
    return {
        "dtype": weights.dtype,
        "weight": weights.format,
        "num_experts": weights.num_experts if weights.expert_map is None else weights.expert_map.numel(),
        "hidden_size": weights.hidden_size,
        "intermediate_size": weights.intermediate_size,
        "expert_parallel": weights.expert_map is not None,
    }
