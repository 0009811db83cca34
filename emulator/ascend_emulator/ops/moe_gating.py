"""Router kernels: top-k after softmax or sigmoid, and the ends of sorted experts."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

SOFTMAX, SIGMOID = 0, 1
NO_EXPERT = torch.iinfo(torch.int32).min  # as `poisoned` fills integers


def largest(values: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k largest per row; equal values in order of index."""
    index = torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]
    return values.gather(-1, index), index


def without_order(call: Call, rule: int, logits: torch.Tensor) -> torch.Tensor:
    """[...] bool: rows that hold NaN. Its order is undefined, so such a row may choose any expert, twice, or none."""
    rows = logits.isnan().any(-1)
    if rows.any():
        call.undefined(
            rule, f"{int(rows.sum())} of {rows.numel()} rows of logits hold NaN: their experts are undefined"
        )
    return rows


@kernel("npu::npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)")
def moe_gating_top_k_softmax(x: torch.Tensor, finished: torch.Tensor | None = None, k: int = 1) -> Triple:
    """Softmax over all experts, then top k, not renormalised: (weights [.., k] of x's dtype, int32 ids, int32 rows).

    The third output numbers the (row, choice) pairs column by column: choice * rows + row.
    """
    call = Call.of("npu_moe_gating_top_k_softmax", "aclnnMoeGatingTopKSoftmax")
    experts = _gating_input(call, x, finished)
    call.require(0 <= k <= experts, 57, f"The k should be in [0, {experts}], got {k}", Layer.BINDING)
    call.require(k <= 1024, 57, f"k should be at most 1024, got {k}", Layer.PARAMETER)
    size = (*x.shape[:-1], k)
    y, ids, rows = poisoned(size, x), poisoned(size, x, torch.int32), poisoned(size, x, torch.int32)
    if call.context.execute and y.numel():
        weights, index = largest(torch.softmax(x.float(), -1), k)
        y.copy_(weights)
        ids.copy_(index)
        ids[without_order(call, 57, x)] = NO_EXPERT
        if finished is not None:
            ids.masked_fill_(finished[..., None], experts)
        count = y.numel() // k
        rows.copy_(torch.arange(count * k, device=x.device).view(k, count).T.reshape(size))
    return y, ids, rows


@kernel(
    "npu::npu_moe_gating_top_k_softmax_v2(Tensor x, *, int k=1, Tensor? finished=None, int? renorm=0, "
    "bool? output_softmax=False) -> (Tensor, Tensor, Tensor)"
)
def moe_gating_top_k_softmax_v2(
    x: torch.Tensor,
    *,
    k: int = 1,
    finished: torch.Tensor | None = None,
    renorm: int | None = 0,
    output_softmax: bool | None = False,
) -> Triple:
    """renorm 0: as above; 1: top k of x itself, then a softmax over these: (weights of x's dtype, int32 ids, softmax).

    Computed in float32 and rounded once. The third output is float32 of x's shape for renorm 0 with output_softmax,
    else empty. (ops-transformer, moe_gating_top_k_softmax_v2: tiling_base.cpp has the checks, op_kernel/…_perf.h the
    order and the rounding of up to 1024 experts in eights and k up to 8. Other sizes round halves away from zero.)
    """
    call = Call.of("npu_moe_gating_top_k_softmax_v2", "aclnnMoeGatingTopKSoftmaxV2")
    experts = _gating_input(call, x, finished)
    call.require(0 < k <= min(experts, 1024), 57, f"k should be 1 to {min(experts, 1024)}, got {k}")
    renorm = renorm or 0
    call.require(renorm in (0, 1), 57, f"renorm should be 0 or 1, got {renorm}")
    size = (*x.shape[:-1], k)
    y, ids = poisoned(size, x), poisoned(size, x, torch.int32)
    whole = poisoned(x.shape if renorm == 0 and output_softmax else (0,), x, torch.float32)
    if call.context.execute and y.numel():
        scores = x.float() if renorm else torch.softmax(x.float(), -1)
        values, index = largest(scores, k)
        y.copy_(torch.softmax(values, -1) if renorm else values)
        ids.copy_(index)
        ids[without_order(call, 57, x)] = NO_EXPERT
        if finished is not None:
            ids.masked_fill_(finished[..., None], experts)
        if whole.numel():
            whole.copy_(scores)
    return y, ids, whole


def _gating_input(call: Call, x: torch.Tensor, finished: torch.Tensor | None) -> int:
    """Checks what both versions require; returns the number of experts."""
    call.require(x.dim() in (2, 3), 57, f"The x should be 2D or 3D, got {shape(x)}", Layer.BINDING)
    call.require(
        x.dtype in FLOATS,
        57,
        f"float16, float32 or bfloat16 tensor expected but got a tensor with dtype: {name_of(x.dtype)}",
        Layer.BINDING,
    )
    if finished is not None:
        call.require(
            finished.dtype == torch.bool and finished.shape == x.shape[:-1],
            None,
            f"finished should be bool {list(x.shape[:-1])}, got {name_of(finished.dtype)} {shape(finished)}",
            Layer.BINDING,
        )
    return x.size(-1)


@kernel(
    "npu::npu_moe_gating_top_k(Tensor x, int k, *, Tensor? bias=None, int k_group=1, int group_count=1, "
    "int group_select_mode=0, int renorm=0, int norm_type=0, bool out_flag=False, float routed_scaling_factor=1.0, "
    "float eps=1e-20) -> (Tensor, Tensor, Tensor)"
)
def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    bias: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> Triple:
    """Norm (0 softmax, 1 sigmoid), selection with the bias added, weights without it; sigmoid weights are renormalised.

    (weights [rows, k] of x's dtype, ids int32, norm of all experts float32, written with out_flag only).
    """
    call = Call.of("npu_moe_gating_top_k", "aclnnMoeGatingTopK")
    call.require(renorm == 0, 58, f"renorm should be 0 before CANN 9.0, got {renorm}")
    groups = (k_group, group_count, group_select_mode)
    return gated(call, x, k, bias, groups, norm_type, out_flag, routed_scaling_factor, eps, norm_type == SIGMOID)


def gated(
    call: Call,
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None,
    groups: tuple[int, int, int],
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    renormalised: bool,
) -> Triple:
    """npu_moe_gating_top_k, and vllm-ascend's copy. groups: k_group, group_count, group_select_mode."""
    k_group, group_count, group_select_mode = groups
    call.require(x.dim() == 2, 58, f"The x should be 2D, got {shape(x)}", Layer.BINDING)
    call.require(
        x.dtype in FLOATS,
        58,
        f"float16, float32 or bfloat16 tensor expected but got a tensor with dtype: {name_of(x.dtype)}",
        Layer.BINDING,
    )
    experts = x.size(1)
    if bias is not None:
        call.require(
            bias.dtype == x.dtype and list(bias.shape) == [experts],
            58,
            f"The bias should be {name_of(x.dtype)} [{experts}], got {name_of(bias.dtype)} {shape(bias)}",
            Layer.BINDING,
        )
    call.require(experts <= 2048, 58, f"experts should be at most 2048, got {experts}")
    call.require(
        group_count > 0 and experts % group_count == 0,
        58,
        f"group_count should divide the {experts} experts, got {group_count}",
    )
    call.require(0 < k_group <= group_count, 58, f"k_group should be 1 to {group_count}, got {k_group}")
    reachable = experts // group_count * k_group
    call.require(0 < k <= reachable, 58, f"k should be 1 to {reachable}, got {k}")
    call.require(
        norm_type in (SOFTMAX, SIGMOID) and group_select_mode in (0, 1),
        58,
        f"norm_type and group_select_mode should be 0 or 1, got {norm_type} and {group_select_mode}",
    )
    y, ids = poisoned((x.size(0), k), x), poisoned((x.size(0), k), x, torch.int32)
    out = poisoned(x.shape, x, torch.float32)
    if not call.context.execute:
        return y, ids, out
    if group_count > 1:
        raise NotEmulatedError(f"{call.op}: the emulator has no expert groups")
    norm = torch.softmax(x.float(), -1) if norm_type == SOFTMAX else torch.sigmoid(x.float())
    index = largest(norm if bias is None else norm + bias.float(), k)[1]
    weights = norm.gather(-1, index)
    if renormalised:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    y.copy_(weights * routed_scaling_factor)
    ids.copy_(index)
    ids[without_order(call, 58, x)] = NO_EXPERT
    if out_flag:
        out.copy_(norm)
    return y, ids, out
