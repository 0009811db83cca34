"""Dispatch and combine across ranks: only refusals, as CANN's document asks for sixteen ranks or more on a 910B."""

from __future__ import annotations

from typing import NoReturn

import torch
from ascend_emulator.ops.table import Arguments, kernel, name_of, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

TAKEN = range(8, 257, 8)  # moe_distribute_dispatch_v2_tiling.cpp of 8.3.RC1: whole machines of eight
FULL_MESH = range(16, 257)
HIERARCHICAL = (16, 32, 64)
MOST_ROWS = 256
WIDEST = {"fullmesh": 7168, "hierarchy": 10240}
MOST_CHOICES = 16
MOST_EXPERTS_PER_RANK = 24

_GROUP = "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num"
_TAIL = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, '
    "int shared_expert_rank_num=0"
)
_SPECIAL = 'str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0'
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _check(call: Call, a: Arguments, x: torch.Tensor, scales: torch.Tensor | None, hidden: int) -> NoReturn:
    hierarchical = getattr(a, "comm_alg", "") == "hierarchy"
    worlds = HIERARCHICAL if hierarchical else FULL_MESH
    call.require(
        a.ep_world_size in TAKEN, 65, f"epWorldSize should be a multiple of 8 up to 256, got {a.ep_world_size}"
    )
    if a.ep_world_size not in worlds:
        documented = "16, 32 or 64" if hierarchical else "16 to 256"
        call.note(
            65, f"the document has ep_world_size {documented} on Atlas A2, and the tiling takes {a.ep_world_size}"
        )
    rows, choices = a.expert_ids.shape
    call.require(rows <= MOST_ROWS, 65, f"BS should be at most {MOST_ROWS}, got {rows} in {shape(a.expert_ids)}")
    widest = WIDEST["hierarchy" if hierarchical else "fullmesh"]
    call.require(
        hidden <= widest and hidden % 32 == 0, 65, f"H should be at most {widest} and a multiple of 32, got {shape(x)}"
    )
    call.require(choices <= MOST_CHOICES, 65, f"K should be at most {MOST_CHOICES}, got {choices}")
    call.require(
        hierarchical or a.moe_expert_num // a.ep_world_size <= MOST_EXPERTS_PER_RANK,
        65,
        f"experts per rank should be at most {MOST_EXPERTS_PER_RANK}, got {a.moe_expert_num} / {a.ep_world_size}",
    )
    call.require(
        a.shared_expert_rank_num == 0 and a.expert_shard_type == 0,
        65,
        f"Atlas A2 has no shared experts here: shared_expert_rank_num should be 0, got {a.shared_expert_rank_num}",
    )
    call.require(
        not a.group_tp and a.tp_world_size in (0, 1),
        65,
        f"Atlas A2 has no tensor-parallel domain here: got group_tp {a.group_tp!r}, tp_world_size {a.tp_world_size}",
    )
    call.require(
        scales is None or scales.dtype == torch.float32,
        65,
        f"expert_scales should be float32, got {'' if scales is None else name_of(scales.dtype)}",
        Layer.PARAMETER,
    )
    raise NotEmulatedError(f"{call.op}: the emulator has no machine of {a.ep_world_size} ranks")


@kernel(
    f"npu::npu_moe_distribute_dispatch(Tensor x, Tensor expert_ids, {_GROUP}, *, Tensor? scales=None, "
    f"Tensor? x_active_mask=None, Tensor? expert_scales=None, {_TAIL}, int quant_mode=0, int global_bs=0, "
    f"int expert_token_nums_type=1) -> {_SEVEN}",
    bundle=True,
)
def moe_distribute_dispatch(a: Arguments) -> NoReturn:
    _check(Call.of("npu_moe_distribute_dispatch", "aclnnMoeDistributeDispatch"), a, a.x, a.expert_scales, a.x.size(-1))


@kernel(
    f"npu::npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, {_GROUP}, *, Tensor? scales=None, "
    f"Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, {_TAIL}, int quant_mode=0, "
    f"int global_bs=0, int expert_token_nums_type=1, {_SPECIAL}) -> {_SEVEN}",
    bundle=True,
)
def moe_distribute_dispatch_v2(a: Arguments) -> NoReturn:
    _check(
        Call.of("npu_moe_distribute_dispatch_v2", "aclnnMoeDistributeDispatchV2"), a, a.x, a.expert_scales, a.x.size(-1)
    )


@kernel(
    "npu::npu_moe_distribute_combine(Tensor expand_x, Tensor expert_ids, Tensor expand_idx, Tensor ep_send_counts, "
    f"Tensor expert_scales, {_GROUP}, *, Tensor? tp_send_counts=None, Tensor? x_active_mask=None, "
    "Tensor? activation_scale=None, Tensor? weight_scale=None, Tensor? group_list=None, Tensor? expand_scales=None, "
    f"Tensor? shared_expert_x=None, {_TAIL}, int global_bs=0, int out_dtype=0, int comm_quant_mode=0, "
    "int group_list_type=0) -> Tensor",
    bundle=True,
)
def moe_distribute_combine(a: Arguments) -> NoReturn:
    call = Call.of("npu_moe_distribute_combine", "aclnnMoeDistributeCombine")
    _check(call, a, a.expand_x, a.expert_scales, a.expand_x.size(-1))


@kernel(
    "npu::npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    f"Tensor ep_send_counts, Tensor expert_scales, {_GROUP}, *, Tensor? tp_send_counts=None, "
    "Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, Tensor? elastic_info=None, "
    "Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, "
    f"Tensor? const_expert_v=None, {_TAIL}, int global_bs=0, int comm_quant_mode=0, {_SPECIAL}) -> Tensor",
    bundle=True,
)
def moe_distribute_combine_v2(a: Arguments) -> NoReturn:
    call = Call.of("npu_moe_distribute_combine_v2", "aclnnMoeDistributeCombineV2")
    _check(call, a, a.expand_x, a.expert_scales, a.expand_x.size(-1))
