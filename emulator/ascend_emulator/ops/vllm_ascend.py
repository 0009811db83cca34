"""Operators of vllm-ascend's own library that gpt-oss uses: schemas of the wheel 0.23.0, contracts of its csrc/moe.

Each extends an operator of CANN. The library belongs to the wheel, so no rule of a CANN release holds; errors use the
numbers of the original operator.
"""

from __future__ import annotations

import torch
from ascend_emulator.ops.moe_dispatch import INIT_ROUTING, Quad, routed
from ascend_emulator.ops.moe_gating import SOFTMAX, Triple, gated
from ascend_emulator.ops.norm import add_normalised
from ascend_emulator.ops.table import Arguments, kernel, name_of
from ascend_emulator.rules import Call, Layer


@kernel(
    "_C_ascend::npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None, "
    "float epsilon=9.9999999999999995e-07) -> (Tensor y, Tensor rstd, Tensor x)"
)
def add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-06,
) -> Triple:
    """x = x1 + x2; (norm of x plus beta, rstd float32, x). bfloat16: x * rstd is rounded before gamma multiplies it."""
    call = Call.of("npu_add_rms_norm_bias", "aclnnAddRmsNormBias")
    call.require(
        beta is None or (beta.dtype == gamma.dtype and beta.shape == gamma.shape),
        70,
        f"beta should be as gamma, {name_of(gamma.dtype)} {list(gamma.shape)}",
        Layer.PARAMETER,
    )
    return add_normalised(call, x1, x2, gamma, epsilon, beta)


@kernel(
    "_C_ascend::moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode, int renorm, "
    "int norm_type, bool out_flag, float routed_scaling_factor, float eps, Tensor? bias_opt=None) "
    "-> (Tensor y, Tensor expert_idx, Tensor out)"
)
def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> Triple:
    """npu_moe_gating_top_k; with renorm 1 the softmax weights are divided by their sum."""
    call = Call.of("moe_gating_top_k", "aclnnMoeGatingTopK")
    call.require(renorm in (0, 1), 58, f"renorm should be 0 or 1, got {renorm}")
    renormalised = norm_type != SOFTMAX or renorm == 1
    groups = (k_group, group_count, group_select_mode)
    return gated(call, x, k, bias_opt, groups, norm_type, out_flag, routed_scaling_factor, eps, renormalised)


@kernel(f"_C_ascend::npu_moe_init_routing_custom{INIT_ROUTING}", bundle=True)
def moe_init_routing_custom(a: Arguments) -> Quad:
    """npu_moe_init_routing_v2 with all experts as the default range."""
    call = Call.of("npu_moe_init_routing_custom", "aclnnMoeInitRoutingCustom")
    return routed(call, a, a.active_expert_range or [0, a.expert_num])
