"""Routing and the routed experts of one layer: the public ops.

`reference.py` defines them; the other modules are solutions. A kernel may own a layout of the weights: its `prepare` is
called once at load by `prepare_experts`, and every later call gets its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import Bound, KernelError, Priority, SelectedKernel, bind, chosen, expect
from npu_gptoss.moe import ascend, packed, reference, small_ops, triton  # noqa: F401  (registers their kernels)
from npu_gptoss.moe.activation import LIMIT, SWIGLUOAI, activation_name
from npu_gptoss.moe.operations import EXPERTS, ROUTE, TOP_K, described, experts_call, route_call
from npu_gptoss.moe.triton.layout import TiledExperts, fill, fill_bias
from npu_gptoss.moe.weights import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts, converted, lone, quantize_fp8

__all__ = [
    "AnyExperts",
    "ExpertWeights",
    "Fp8Experts",
    "Mxfp4Experts",
    "PreparedExperts",
    "bind_route",
    "converted",
    "expert_mlp",
    "keeps_format",
    "lone",
    "prepare_experts",
    "quantize_fp8",
    "rewrite_bias",
    "rewrite_experts",
    "route",
]


@dataclass(frozen=True)
class PreparedExperts:
    """A layer's experts, for each range of tokens in the layout of the kernel that was selected for it.

    bound: the kernels. layouts: the results of their `prepare`; kernels of one solution share it, and
    so one copy of the weights.
    """

    bound: Bound
    layouts: Mapping[Callable[..., Any] | None, Any]
    hidden_size: int
    swiglu_limit: float

    @property
    def kernel(self) -> SelectedKernel:
        """The kernel of the largest batches."""
        return self.bound.ranges[-1][1]

    @property
    def weights(self) -> Any:
        """The weights in the layout of `kernel`."""
        return self.layouts[self.kernel.kernel.prepare]


def bind_route(logits: torch.dtype) -> Bound:
    """The kernel of a layer's `route`."""
    return bind(ROUTE, lambda _: route_call(logits))


def route(
    router_logits: torch.Tensor, top_k: int, *, kernel: Bound | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token: the `top_k` largest logits, weighted by a softmax over those k in fp32.

    router_logits: [tokens, experts]. kernel: of `bind_route`, or the name of a kernel or solution, to override the
    selection. Returns weights [tokens, top_k] float32, or rounded once to the dtype of the logits, which sum to 1, and
    ids [tokens, top_k] int64 or int32, largest logit first.
    """
    if router_logits.dim() != 2:
        expect("router_logits", router_logits, "tokens", "experts")
    if not 1 <= top_k <= router_logits.shape[1]:
        raise InputError(f"top_k must be 1 to {router_logits.shape[1]} (the experts), got {top_k}", field="top_k")
    run = chosen(ROUTE, kernel, 0, lambda _: route_call(router_logits.dtype))
    return run(logits=router_logits, top_k=top_k)


def prepare_experts(
    weights: AnyExperts,
    *,
    activation: object = SWIGLUOAI,
    swiglu_limit: float = LIMIT,
    top_k: int = TOP_K,
    kernel: str | None = None,
) -> PreparedExperts:
    """Selects the kernels of a layer's experts and brings the weights into their layout; once, at load.

    activation: "swigluoai" or an enum member of that value; anything else raises.
    top_k: of the calls to come; more experts to a token change which kernel is fast, none is wrong.
    kernel: the name of a kernel or solution, to override the selection. One that is for some numbers of tokens only
        replaces the automatic choice there, and the others keep theirs.
    """
    settings = {"top_k": top_k, "activation": activation_name(activation), **described(weights)}
    bound = bind(EXPERTS, partial(experts_call, **settings), kernel)
    prepares = {run.kernel.prepare for _, run in bound.ranges}
    layouts = {prepare: weights if prepare is None else prepare(weights, swiglu_limit) for prepare in prepares}
    return PreparedExperts(bound, layouts, weights.hidden_size, swiglu_limit)


def rewrite_experts(prepared: PreparedExperts, name: str, weights: AnyExperts) -> None:
    """Writes other weights of one projection to the addresses of the first.

    weights: in the format that was prepared; only the tensors of `name` are read (`weights.lone`). Raises InputError
    for the layout of a kernel from outside of this package.
    """
    for layout in _own_layouts(prepared):
        if isinstance(layout, TiledExperts):
            fill(layout.matrix(name), weights, name)
            continue
        whole = getattr(layout, name)
        for expert in range(layout.num_experts):
            whole[expert].copy_(weights.rows(name, expert, whole.dtype).t())


def rewrite_bias(prepared: PreparedExperts, name: str, bias: torch.Tensor) -> None:
    """Does as `rewrite_experts`, for a projection's bias [experts, rows]."""
    for layout in _own_layouts(prepared):
        if isinstance(layout, TiledExperts):
            fill_bias(layout.matrix(name), bias, name)
        else:
            getattr(layout, f"{name}_bias").copy_(bias)


def _own_layouts(prepared: PreparedExperts) -> list[TiledExperts | ExpertWeights]:
    for layout in prepared.layouts.values():
        if not isinstance(layout, (TiledExperts, ExpertWeights)):
            raise InputError(
                f"the experts have the layout {type(layout).__name__} of {prepared.kernel.name}, which cannot be "
                "rewritten; restart the server with the new weights",
                field="weights",
            )
    return list(prepared.layouts.values())


def keeps_format(weight_format: str, dtype: torch.dtype) -> bool:
    """True when kernels for this machine compute with experts in `weight_format`, without expanding them.

    weight_format: "mxfp4" or "float8_e4m3fn". dtype: of the activations.
    """
    sizes = {"num_experts": 32, "hidden_size": 2880, "intermediate_size": 2880}  # of 20b
    try:
        bound = bind(EXPERTS, partial(experts_call, dtype=dtype, weight=weight_format, **sizes))
    except KernelError:
        return False
    return all(run.kernel.priority >= Priority.PERFORMANT for _, run in bound.ranges)


def expert_mlp(
    hidden_states: torch.Tensor, prepared: PreparedExperts, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> torch.Tensor:
    """The weighted sum of the routed experts' outputs: see `reference` for the formula.

    hidden_states: [tokens, hidden]. topk_weights, topk_ids: [tokens, k] from `route`, ids of the global experts;
    a negative id is padding and adds nothing.
    Returns [tokens, hidden] in the dtype of hidden_states: the local experts' share, before any all-reduce.
    """
    expect("hidden_states", hidden_states, len(hidden_states), prepared.hidden_size)
    expect("topk_ids", topk_ids, len(hidden_states), topk_ids.shape[-1])
    expect("topk_weights", topk_weights, *topk_ids.shape)
    if hidden_states.shape[0] == 0:
        return torch.empty_like(hidden_states)
    run = prepared.bound.of(hidden_states.shape[0])
    return run(
        hidden_states=hidden_states,
        weights=prepared.layouts[run.kernel.prepare],
        topk_weights=topk_weights,
        topk_ids=topk_ids,
        swiglu_limit=prepared.swiglu_limit,
    )
