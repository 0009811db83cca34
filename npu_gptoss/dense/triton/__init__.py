"""The dense operations as Triton kernels for CUDA.

Up to some rows on Hopper: projections in Gluon, with what follows them fused. Elsewhere a single decode row: the whole
of an operation in one launch, the projection as a matrix-vector product. More rows: the projection is cuBLAS's. Triton
is imported at the first call, so that a machine without it can list these kernels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from npu_gptoss.dense import small_ops
from npu_gptoss.dense.operations import ADD_NORM, FP8, GREEDY, LOGITS, OUTPUT, QKV, ROUTER
from npu_gptoss.dense.small_ops import route_live
from npu_gptoss.dense.weights import RowScaled, Weight, expanded
from npu_gptoss.kernels import ANY, Capability, Priority, accepts, register_kernel
from npu_gptoss.kernels.rows import FEW, FEW_ROWS, MANY, ONE

if TYPE_CHECKING:
    from npu_gptoss.attention import StepMetadata

CUDA = Capability.of("cuda", features=("triton",))
HEAD_DIMS = frozenset({16, 32, 64, 128})
BF16 = "bfloat16"


@register_kernel(
    QKV.family,
    QKV.mode,
    solution="triton_gemv",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=(BF16, FP8), kv=BF16),),
    traits={"rows": frozenset({ONE}), "head_dim": HEAD_DIMS},
    priority=Priority.PERFORMANT - 1,
)
def qkv_gemv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch: add, norm, matrix-vector product, RoPE, cache write."""
    from npu_gptoss.dense.triton import launches

    return launches.qkv_gemv(
        residual, delta, norm_weight, eps, weight, bias, cos_sin, positions, key_cache, value_cache, metadata
    )


@register_kernel(
    QKV.family,
    QKV.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=(BF16, FP8), kv=BF16),),
    traits={"rows": frozenset({ONE, FEW, MANY}), "head_dim": HEAD_DIMS},
    priority=Priority.PERFORMANT,
)
def qkv(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: Weight,
    bias: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
) -> tuple[torch.Tensor, torch.Tensor]:
    """On Hopper two launches for some rows: add and norm, then all the rest. Else one for one row, three for more."""
    from npu_gptoss.dense.triton import launch_hopper, launches

    on_hopper = launch_hopper.takes(residual, weight) and key_cache.shape[3] == launch_hopper.HEAD_DIM
    if len(residual) == 1 and not on_hopper:
        return launches.qkv_gemv(
            residual, delta, norm_weight, eps, weight, bias, cos_sin, positions, key_cache, value_cache, metadata
        )
    hidden, normed = launches.add_norm(residual, delta, norm_weight, eps)
    if on_hopper:
        query = launch_hopper.qkv(normed, weight, bias, cos_sin, positions, key_cache, value_cache, metadata)
        return hidden, query
    if isinstance(weight, RowScaled) and len(normed) <= FEW_ROWS:
        packed = launches.linear_few(normed, weight, bias, None)
    else:
        packed = F.linear(normed, expanded(weight, normed.dtype), bias)
    return hidden, launches.rope_cache(packed, cos_sin, positions, key_cache, value_cache, metadata)


@register_kernel(
    OUTPUT.family,
    OUTPUT.mode,
    solution="triton_gemv",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=(BF16, FP8)),),
    traits={"rows": frozenset({ONE})},
    priority=Priority.PERFORMANT - 1,
)
def output_gemv(
    attended: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """One launch: matrix-vector product, bias, residual."""
    from npu_gptoss.dense.triton import launches

    return launches.linear_gemv(attended, weight, bias, residual)


@register_kernel(
    OUTPUT.family,
    OUTPUT.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=(BF16, FP8)),),
    traits={"rows": frozenset({ONE, FEW})},
    priority=Priority.PERFORMANT,
)
def output_few(
    attended: torch.Tensor, weight: Weight, bias: torch.Tensor | None, residual: torch.Tensor | None
) -> torch.Tensor:
    """One launch; several rows and weights in sixteen bits are cuBLAS's where there is no Hopper."""
    from npu_gptoss.dense.triton import launch_hopper, launches

    if launch_hopper.takes(attended, weight):
        return launch_hopper.linear(attended, weight, bias, residual)
    if len(attended) == 1:
        return launches.linear_gemv(attended, weight, bias, residual)
    if isinstance(weight, RowScaled):
        return launches.linear_few(attended, weight, bias, residual)
    return small_ops.output(attended, weight, bias, residual)


@register_kernel(
    ROUTER.family,
    ROUTER.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=BF16),),
    traits={"rows": frozenset({ONE, FEW})},
    priority=Priority.PERFORMANT,
)
def router(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    live: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One launch: add, norm, router, top-k, softmax. On Hopper for many logits two: add and norm, then the rest."""
    from npu_gptoss.dense.triton import launch_hopper, launches

    if launch_hopper.routes(residual, weight):
        hidden, normed = launches.add_norm(residual, delta, norm_weight, eps)
        return hidden, normed, *launch_hopper.router(normed, weight, bias, top_k, live)
    return launches.router(residual, delta, norm_weight, eps, weight, bias, top_k, live)


@register_kernel(
    ROUTER.family,
    ROUTER.mode,
    solution="triton_norm",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=BF16),),
    traits={"rows": ANY},
    priority=Priority.PERFORMANT - 1,
)
def router_after_norm(
    residual: torch.Tensor,
    delta: torch.Tensor | None,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
    top_k: int,
    live: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add and norm fused, then cuBLAS and the MoE family's routing."""
    from npu_gptoss.dense.triton import launches

    hidden, normed = launches.add_norm(residual, delta, norm_weight, eps)
    return hidden, normed, *route_live(normed, weight, bias, top_k, live)


@register_kernel(
    ADD_NORM.family,
    ADD_NORM.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(hidden=BF16),),
    traits={},
    priority=Priority.PERFORMANT,
)
def add_norm(
    residual: torch.Tensor, delta: torch.Tensor | None, norm_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One launch, a program a row."""
    from npu_gptoss.dense.triton import launches

    return launches.add_norm(residual, delta, norm_weight, eps)


@register_kernel(
    LOGITS.family,
    LOGITS.mode,
    solution="triton_gemv",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=(BF16, FP8)),),
    traits={"rows": frozenset({ONE})},
    priority=Priority.SPECIALISED,
)
def logits_gemv(normed: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    """A matrix-vector product."""
    from npu_gptoss.dense.triton import launches

    launches.linear_gemv(normed, weight, None, None, out)


@register_kernel(
    LOGITS.family,
    LOGITS.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(hidden=BF16, weight=FP8),),
    traits={"rows": frozenset({ONE, FEW})},
    priority=Priority.PERFORMANT,
)
def logits_few(normed: torch.Tensor, weight: Weight, out: torch.Tensor) -> None:
    """One launch through the matrix units, for weights in eight bits."""
    from npu_gptoss.dense.triton import launches

    launches.linear_few(normed, weight, None, None, out)


@register_kernel(
    GREEDY.family,
    GREEDY.mode,
    solution="triton",
    capability=CUDA,
    signatures=(accepts(logits=("float32", BF16)),),
    traits={},
    priority=Priority.PERFORMANT,
)
def greedy(logits: torch.Tensor, out: torch.Tensor) -> None:
    """Two launches; the first of equal logits."""
    from npu_gptoss.dense.triton import launches

    launches.greedy(logits, out)
