"""LoRA adapters of experts, several beside one another; each token has one of them or none.

    expert(x) = swigluoai(x @ gate_up + bias + B A x) @ down + bias + B' A' swigluoai(…)

B holds the adapter's scaling (`model.adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.moe.triton.layout import TiledExperts

if TYPE_CHECKING:
    from npu_gptoss.moe import PreparedExperts


@dataclass(frozen=True)
class ExpertPair:
    """The factors of one projection. a: [adapters, experts, rank, inputs]; b: [adapters, experts, rows, rank], the rows
    of gate_up in the order of the kernels' layout (`triton.layout.bands`)."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class ExpertAdapters:
    """of_token: [tokens] int32, the adapter of each token; negative: none."""

    gate_up: ExpertPair
    down: ExpertPair
    of_token: torch.Tensor


def expert_mlp(
    hidden_states: torch.Tensor,
    prepared: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    adapters: ExpertAdapters,
) -> torch.Tensor:
    """Computes `moe.expert_mlp` by the Triton kernels. Raises InputError for experts in another layout."""
    if not isinstance(prepared.weights, TiledExperts):
        raise InputError(
            f"adapters of experts need the Triton kernels, got {prepared.kernel.name}: "
            "unset NPU_GPTOSS_KERNEL_MOE_EXPERTS",
            field="weights",
        )
    from npu_gptoss.moe.triton.launches import triton_many

    return triton_many(
        adapters,
        hidden_states=hidden_states,
        weights=prepared.weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        swiglu_limit=prepared.swiglu_limit,
    )
