"""Routing and the routed experts of one layer: the public ops.

`reference.py` defines them; the other modules are solutions. A kernel may own a layout of the weights: its `prepare` is
called once at load by `prepare_experts`, and every later call gets what it returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import (
    Priority,
    SelectedKernel,
    Signature,
    explain,
    kernel_override,
    select_kernel,
    signature,
)
from npu_gptoss.kernels.rows import MANY, ROW_CLASSES, row_class
from npu_gptoss.kernels.selection import override_for
from npu_gptoss.moe import ascend, reference, small_ops, triton  # noqa: F401  (registers their kernels)
from npu_gptoss.moe.activation import LIMIT, SWIGLUOAI, activation_name
from npu_gptoss.moe.operations import EXPERTS, ROUTE
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts, quantize_fp8

__all__ = [
    "AnyExperts",
    "ExpertWeights",
    "Fp8Experts",
    "Mxfp4Experts",
    "PreparedExperts",
    "expert_mlp",
    "keeps_format",
    "prepare_experts",
    "quantize_fp8",
    "route",
]


@dataclass(frozen=True)
class PreparedExperts:
    """A layer's experts, for each class of batch in the layout of the kernel that was selected for it.

    Kernels of one solution share their `prepare`, and so one copy of the weights.
    """

    paths: Mapping[str, tuple[SelectedKernel, Any]]  # row class -> kernel, what its `prepare` made of the weights
    hidden_size: int
    swiglu_limit: float

    @property
    def kernel(self) -> SelectedKernel:
        """Of large batches."""
        return self.paths[MANY][0]

    @property
    def weights(self) -> Any:
        """In the layout of `kernel`."""
        return self.paths[MANY][1]


def route(router_logits: torch.Tensor, top_k: int, *, kernel: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token: the `top_k` largest logits, weighted by a softmax over those k in fp32.

    router_logits: [tokens, experts]. Returns weights [tokens, top_k] float32, which sum to 1, and ids [tokens, top_k]
    int64 or int32, largest logit first.
    """
    if router_logits.dim() != 2 or not 1 <= top_k <= router_logits.shape[1]:
        raise InputError(
            "router_logits must be [tokens, experts] and top_k 1 to experts, "
            f"got {list(router_logits.shape)} and {top_k}"
        )
    run = select_kernel(ROUTE, signature(logits=router_logits.dtype), {}, override=kernel)
    return run(logits=router_logits, top_k=top_k)


def prepare_experts(
    weights: AnyExperts,
    *,
    activation: object = SWIGLUOAI,
    swiglu_limit: float = LIMIT,
    kernel: str | None = None,
) -> PreparedExperts:
    """Selects the kernels of a layer's experts and brings the weights into their layout; once, at load.

    activation: "swigluoai" or an enum member of that value; anything else raises.
    kernel: the name of a kernel or solution, to override the selection. One that is for some classes of batch only
        replaces the automatic choice there, and the other classes keep theirs.
    """
    call = signature(hidden=weights.dtype, weight=weights.format)
    common = {"activation": activation_name(activation), "expert_parallel": weights.expert_map is not None}
    prepared: dict[Callable[..., Any] | None, Any] = {None: weights}
    paths = {}
    for rows, override in _override_by_rows(call, common, kernel).items():
        with kernel_override(moe_experts=override):
            run = select_kernel(EXPERTS, call, {**common, "rows": rows})
        prepare = run.kernel.prepare
        if prepare not in prepared:
            prepared[prepare] = prepare(weights, swiglu_limit)
        paths[rows] = run, prepared[prepare]
    return PreparedExperts(paths, weights.hidden_size, swiglu_limit)


def keeps_format(weight_format: str, dtype: torch.dtype) -> bool:
    """Whether kernels made for this machine compute with the experts in `weight_format`, instead of expanding them.

    weight_format: "mxfp4" or "float8_e4m3fn". dtype: of the activations.
    """
    call = signature(hidden=dtype, weight=weight_format)
    common = {"activation": SWIGLUOAI, "expert_parallel": False}
    for rows, override in _override_by_rows(call, common, None).items():
        with kernel_override(moe_experts=override):
            chosen = explain(EXPERTS, call, {**common, "rows": rows}).selected
        if chosen is None or chosen.priority < Priority.PERFORMANT:
            return False
    return True


def _override_by_rows(call: Signature, common: Mapping[str, Any], kernel: str | None) -> dict[str, str]:
    """The override in force for each class of batch, "" for none: `kernel`, else the context's, else the user's.

    One that can run some classes only leaves the others their automatic choice; one that can run none stays, to raise.
    """
    override = kernel or override_for(EXPERTS) or ""
    able = {
        rows: explain(EXPERTS, call, {**common, "rows": rows}, override=override).selected is not None
        for rows in ROW_CLASSES
    }
    return {rows: override if able[rows] or not any(able.values()) else "" for rows in ROW_CLASSES}


def expert_mlp(
    hidden_states: torch.Tensor,
    prepared: PreparedExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of the routed experts' outputs: see `reference` for the formula.

    hidden_states: [tokens, hidden]. topk_weights, topk_ids: [tokens, k] from `route`, ids of the global experts;
    a negative id is padding and adds nothing.
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
    run, weights = prepared.paths[row_class(hidden_states.shape[0])]
    return run(
        hidden_states=hidden_states,
        weights=weights,
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        swiglu_limit=prepared.swiglu_limit,
    )
