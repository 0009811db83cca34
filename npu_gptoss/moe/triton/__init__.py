"""Routing and experts as Triton kernels for CUDA.

Three paths share one layout of the weights (`layout.py`): a single token (`few.py`; on Hopper, in MXFP4,
`one_hopper.py`), a decode batch (`few.py`; on Hopper, for small ones in MXFP4, `few_hopper.py`), a prefill (`many.py`;
on Hopper, for long ones in MXFP4, `many_hopper.py`).
Weights stay in bfloat16, FP8 or MXFP4 and are opened in registers (`device.py`). `tuned.py` is the table of tile sizes,
`launches.py` the host's side. Triton is imported at the first call, so that a machine without it can list these
kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from npu_gptoss.kernels import ANY, Capability, Priority, accepts, register_kernel
from npu_gptoss.kernels.rows import FEW, MANY, ONE
from npu_gptoss.moe.activation import SWIGLUOAI
from npu_gptoss.moe.operations import EXPERTS, PACKED_FORMATS, ROUTE, WEIGHT_DTYPES
from npu_gptoss.moe.triton.layout import prepare

if TYPE_CHECKING:
    from npu_gptoss.moe.triton.layout import TiledExperts

CUDA = Capability.of("cuda", features=("triton",))
TAKES = (accepts(hidden="bfloat16", weight=("bfloat16", *PACKED_FORMATS)),)


@register_kernel(
    ROUTE.family,
    ROUTE.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(logits=WEIGHT_DTYPES),),
    traits={},
    priority=Priority.PERFORMANT,
)
def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch; of equal logits the expert with the lower number comes first."""
    from npu_gptoss.moe.triton import launches

    return launches.route(logits, top_k)


@register_kernel(
    EXPERTS.family,
    EXPERTS.mode,
    solution="triton",
    name="moe.experts.triton_one",
    capability=CUDA,
    signatures=TAKES,
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY, "rows": frozenset({ONE})},
    priority=Priority.SPECIALISED,
    prepare=prepare,
)
def expert_mlp_one(
    hidden_states: torch.Tensor,
    weights: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """A program for each tile of rows of each expert that the token chose; the ids stay on the device."""
    from npu_gptoss.moe.triton import launches

    return launches.expert_mlp_few(hidden_states, weights, topk_weights, topk_ids, swiglu_limit, one=True)


@register_kernel(
    EXPERTS.family,
    EXPERTS.mode,
    solution="triton",
    name="moe.experts.triton_few",
    capability=CUDA,
    signatures=TAKES,
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY, "rows": frozenset({ONE, FEW})},
    priority=Priority.PERFORMANT + 1,
    prepare=prepare,
)
def expert_mlp_few(
    hidden_states: torch.Tensor,
    weights: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """Direct grouped products: each program finds its expert's tokens, each distinct expert is read once."""
    from npu_gptoss.moe.triton import launches

    return launches.expert_mlp_few(hidden_states, weights, topk_weights, topk_ids, swiglu_limit, one=False)


@register_kernel(
    EXPERTS.family,
    EXPERTS.mode,
    solution="triton",
    name="moe.experts.triton_many",
    capability=CUDA,
    signatures=TAKES,
    traits={"activation": frozenset({SWIGLUOAI}), "expert_parallel": ANY, "rows": frozenset({ONE, FEW, MANY})},
    priority=Priority.PERFORMANT,
    prepare=prepare,
)
def expert_mlp_many(
    hidden_states: torch.Tensor,
    weights: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """Sorted, ragged grouped products over a grid that depends on shapes alone."""
    from npu_gptoss.moe.triton import launches

    return launches.expert_mlp_many(hidden_states, weights, topk_weights, topk_ids, swiglu_limit)
