"""Brings tokens into expert order: init_routing_v2 and token_permute."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from ascend_emulator.ops.table import Arguments, kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
COUNT, KEY_VALUE = 1, 2
GATHER, SCATTER = 0, 1
NO_QUANTISATION, DYNAMIC_INT8 = -1, 1

_served: dict[tuple[int, int], int] = {}  # rows of the call before, for the defect stale-counts

Quad = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


INIT_ROUTING = (  # of version 2 and of vllm-ascend's copy
    "(Tensor x, Tensor expert_idx, *, Tensor? scale=None, Tensor? offset=None, int active_num=-1, "
    "int expert_capacity=-1, int expert_num=-1, int drop_pad_mode=0, int expert_tokens_num_type=0, "
    "bool expert_tokens_num_flag=False, int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


@kernel(f"npu::npu_moe_init_routing_v2{INIT_ROUTING}", bundle=True)
def moe_init_routing_v2(a: Arguments) -> Quad:
    """x [M, H], expert_idx int32 [M, K] -> rows by expert [M * K, H], row map int32 [M * K], int64 counts, f32 scales.

    Serves experts [start, end) only; their rows come first, sorted stably by (expert, row * K + choice). Row map of
    gather: row * K + choice -> place or -1; of scatter: place -> row * K + choice. Later rows are unwritten.
    """
    return routed(Call.of("npu_moe_init_routing_v2", "aclnnMoeInitRoutingV3"), a, a.active_expert_range)


def routed(call: Call, a: Arguments, served_range: Sequence[int]) -> Quad:
    """npu_moe_init_routing_v2, and vllm-ascend's copy of it with another default range."""
    span = [int(v) for v in served_range]
    _check_v2(call, a, span)
    start, end = span
    rows, choices = a.expert_idx.shape
    pairs = rows * choices
    dtype = a.x.dtype if a.quant_mode == NO_QUANTISATION else torch.int8
    expanded = poisoned((pairs, a.x.size(1)), a.x, dtype)
    row_map = poisoned((pairs,), a.expert_idx)
    counts = poisoned((end - start,) if a.expert_tokens_num_type == COUNT else (a.expert_num, 2), a.x, torch.int64)
    scales = poisoned((pairs,), a.x, torch.float32)
    if not call.context.execute:
        return expanded, row_map, counts, scales
    if a.quant_mode != NO_QUANTISATION:
        raise NotEmulatedError(f"{call.op}: the emulator has no dynamic quantisation here")
    experts = a.expert_idx.flatten().long()
    served = (experts >= start) & (experts < end)
    order = torch.sort(torch.where(served, experts, a.expert_num), stable=True).indices
    active = int(served.sum())
    expanded[:active] = a.x[order[:active] // choices]
    if a.row_idx_type == GATHER:
        placed = active
        if "stale-counts" in call.context.defects and end - start < a.expert_num:
            placed, _served[(start, end)] = min(_served.get((start, end), active), pairs), active
        row_map.fill_(-1)
        row_map[order[:placed]] = torch.arange(placed, dtype=torch.int32)
    else:
        row_map[:active] = order[:active].to(torch.int32)
    histogram = torch.bincount(experts[served], minlength=a.expert_num)
    if a.expert_tokens_num_type == COUNT:
        counts.copy_(histogram[start:end])
    else:
        present = histogram.nonzero().flatten()
        counts.zero_()
        counts[: present.numel()] = torch.stack([present, histogram[present]], -1)
    if a.scale is not None:
        scales[:active] = a.scale.flatten()[order[:active] // choices].float()
    return expanded, row_map, counts, scales


def _check_v2(call: Call, a: Arguments, span: list[int]) -> None:
    call.require(
        len(span) == 2,
        59,
        f"active_expert_range should be [start, end], got {span}: the binding reads two entries unchecked",
        Layer.BINDING,
    )
    call.require(
        a.expert_idx.dim() == 2 and a.expert_idx.dtype == torch.int32,
        59,
        f"expert_idx should be int32 [M, K], got {name_of(a.expert_idx.dtype)} {shape(a.expert_idx)}",
        Layer.PARAMETER,
    )
    call.require(
        a.x.dim() == 2 and a.x.size(0) == a.expert_idx.size(0),
        59,
        f"x should have expert_idx's rows, got x {shape(a.x)} and expert_idx {shape(a.expert_idx)}",
    )
    call.require(
        a.x.dtype in FLOATS or (a.x.dtype == torch.int8 and a.quant_mode == NO_QUANTISATION),
        59,
        f"x should be float16, bfloat16 or float32 (int8 with quant_mode -1), got {name_of(a.x.dtype)}",
        Layer.PARAMETER,
    )
    kind = a.expert_tokens_num_type
    most = 5120 if kind == KEY_VALUE else 10240
    call.require(0 < a.expert_num <= most, 59, f"expert_num should be 1 to {most}, got {a.expert_num}")
    start, end = span
    call.require(
        0 <= start < end <= a.expert_num,
        59,
        f"active_expert_range should satisfy 0 <= start < end <= expert_num = {a.expert_num}, got {span}",
    )
    call.require(a.drop_pad_mode == 0, 59, f"drop_pad_mode should be 0, got {a.drop_pad_mode}")
    call.require(a.expert_tokens_num_flag, 59, "expert_tokens_num_flag should be True, got False")
    call.require(kind in (COUNT, KEY_VALUE), 59, f"expert_tokens_num_type should be 1 or 2, got {kind}")
    call.require(
        a.quant_mode in (NO_QUANTISATION, DYNAMIC_INT8), 59, f"quant_mode should be -1 or 1, got {a.quant_mode}"
    )
    call.require(a.row_idx_type in (GATHER, SCATTER), 59, f"row_idx_type should be 0 or 1, got {a.row_idx_type}")
    call.require(
        a.active_num in (-1, a.expert_idx.numel()),
        59,
        f"active_num should be -1 or M * K = {a.expert_idx.numel()}, got {a.active_num}",
    )


@kernel(
    "npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
    "-> (Tensor, Tensor)"
)
def moe_token_permute(
    tokens: torch.Tensor, indices: torch.Tensor, num_out_tokens: int | None = None, padded_mode: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """tokens [M, H], indices [M] or [M, K] -> rows sorted by index [min(M * K, num_out), H], and each pair's place."""
    call = Call.of("npu_moe_token_permute", "aclnnMoeTokenPermute")
    call.require(not padded_mode, 61, "padded_mode should be False, got True", Layer.PARAMETER)
    call.require(
        tokens.dim() >= 2 and tokens.dtype in FLOATS,
        None,
        f"tokens should be float with two dimensions or more, got {name_of(tokens.dtype)} {shape(tokens)}",
        Layer.PARAMETER,
    )
    call.require(
        indices.dtype in (torch.int32, torch.int64) and indices.dim() in (1, 2) and indices.size(0) == tokens.size(0),
        61,
        f"indices should be int32 or int64 [{tokens.size(0)}] or [{tokens.size(0)}, K], got {name_of(indices.dtype)} "
        f"{shape(indices)}",
        Layer.PARAMETER,
    )
    choices = indices.size(1) if indices.dim() == 2 else 1
    call.require(choices <= 512, 61, f"K should be at most 512, got {choices}")
    pairs = indices.numel()
    wanted = num_out_tokens or 0
    kept = min(wanted, pairs) if wanted > 0 else wanted + pairs
    permuted = poisoned((kept, *tokens.shape[1:]), tokens)
    places = poisoned((pairs,), indices, torch.int32)
    if call.context.execute:
        values = indices.flatten()
        if pairs and not 0 <= int(values.min()) <= int(values.max()) < (1 << 24) - 1:
            call.undefined(61, f"indices should be 0 to 16777214, got {int(values.min())} to {int(values.max())}")
            return permuted, places
        order = torch.sort(values, stable=True).indices
        permuted.copy_(tokens[order[:kept] // choices])
        places[order] = torch.arange(pairs, dtype=torch.int32)
    return permuted, places
