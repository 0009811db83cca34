"""Dispatch and combine across ranks (MC2): rows go to the ranks of their experts, and weighted sums come back.

Version 2 is computed, without shared or special experts, quantisation or a TP domain. Limits are those of the tiling of
8.3.RC1 (ops-transformer b122ed222) and of 9.1 (op_tiling/arch22). Rows of a rank come expert by expert, those of one
expert in the order of their ranks and tokens; `assist_info` holds (rank, token, choice) of each, as an A3's kernel has
it. No text promises that to a caller.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import NoReturn

import torch
from ascend_emulator.context import Group
from ascend_emulator.ops.table import Arguments, kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

MIB = 1 << 20
MOST_CHOICES = 16
TRIPLE = 3  # of assist_info's 128 integers a row


@dataclass(frozen=True)
class Limits:
    """worlds: how many ranks. documented: the ones that the document names, where the tiling takes more."""

    worlds: range
    rows: int
    hidden: range
    experts: int
    a_rank: int | None = None  # experts of one rank
    small: range = range(0)  # worlds beside `worlds`
    documented: range | tuple[int, ...] | None = None


# (card, CANN 9 or later, hierarchical)
LIMITS = {
    ("A2", False, False): Limits(range(8, 257, 8), 256, range(32, 7169, 32), 512, 24, documented=range(16, 257)),
    ("A2", False, True): Limits(range(8, 257, 8), 256, range(32, 10241, 32), 512, documented=(16, 32, 64)),
    ("A2", True, False): Limits(range(8, 385, 8), 256, range(32, 10241, 32), 1024, small=range(1, 9)),
    ("A2", True, True): Limits(range(8, 65, 8), 512, range(32, 10241, 32), 512, small=range(1, 9)),
    ("A3", False, False): Limits(range(2, 769), 512, range(1024, 8193), 1024),
    ("A3", True, False): Limits(range(2, 769), 512, range(1024, 8193), 1024),
}

_GROUP = "str group_ep, int ep_world_size, int ep_rank_id, int moe_expert_num"
_TAIL = (
    'str group_tp="", int tp_world_size=0, int tp_rank_id=0, int expert_shard_type=0, int shared_expert_num=1, '
    "int shared_expert_rank_num=0"
)
_SPECIAL = 'str comm_alg="", int zero_expert_num=0, int copy_expert_num=0, int const_expert_num=0'
_SEVEN = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"


def _range(values: range) -> str:
    step = f" by {values.step}" if values.step > 1 else ""
    return f"{values[0]} to {values[-1]}{step}"


def _aligned(size: int, to: int) -> int:
    return -(-size // to) * to


def _most_rows(a: Arguments) -> int:
    """Rows of the rank that has most."""
    return a.global_bs // a.ep_world_size or a.expert_ids.size(0)


def _check(call: Call, a: Arguments, x: torch.Tensor, scales: torch.Tensor | None, hidden: int) -> None:
    """Raises what each rank's host refuses by itself (R65)."""
    hierarchical = getattr(a, "comm_alg", "") == "hierarchy"
    card, later = call.context.card, call.context.cann >= "9"
    if hierarchical and card != "A2":
        raise NotEmulatedError(f"{call.op}: comm_alg 'hierarchy' on an {card} is not emulated")
    limits, ranks = LIMITS[card, later, hierarchical], a.ep_world_size

    def require(condition: object, sentence: str, layer: Layer = Layer.TILING) -> None:
        call.require(condition, 65, f"{sentence} on an {card}", layer)

    worlds = " or ".join(_range(each) for each in (limits.small, limits.worlds) if each)
    require(ranks in limits.worlds or ranks in limits.small, f"epWorldSize should be {worlds}, got {ranks}")
    if limits.documented is not None and ranks not in limits.documented:
        named = _range(limits.documented) if isinstance(limits.documented, range) else "16, 32 or 64"
        call.note(65, f"the document has ep_world_size {named} on an {card}, and the tiling takes {ranks}")
    require(0 <= a.ep_rank_id < ranks, f"epRankId should be in [0, {ranks}), got {a.ep_rank_id}", Layer.BINDING)
    rows, choices = a.expert_ids.shape
    require(0 < rows <= limits.rows, f"BS should be 1 to {limits.rows}, got {rows} in {shape(a.expert_ids)}")
    require(hidden in limits.hidden, f"H should be {_range(limits.hidden)}, got {shape(x)}")
    require(choices <= MOST_CHOICES, f"K should be at most {MOST_CHOICES}, got {choices}")
    require(
        0 < a.moe_expert_num <= limits.experts and a.moe_expert_num % ranks == 0,
        f"moeExpertNum should be at most {limits.experts} and shared out evenly, got {a.moe_expert_num} / {ranks}",
    )
    require(
        limits.a_rank is None or a.moe_expert_num // ranks <= limits.a_rank,
        f"experts per rank should be at most {limits.a_rank}, got {a.moe_expert_num} / {ranks}",
    )
    if card == "A2":
        require(
            a.shared_expert_rank_num == 0 and a.expert_shard_type == 0,
            f"there should be no shared experts: shared_expert_rank_num 0, got {a.shared_expert_rank_num}",
        )
        require(
            (later or not a.group_tp) and a.tp_world_size in (0, 1),
            f"there should be no TP domain: got group_tp {a.group_tp!r}, tp_world_size {a.tp_world_size}",
        )
    else:
        require(a.expert_shard_type == 0, f"expertShardType should be 0, got {a.expert_shard_type}")
        require(a.tp_world_size in (0, 1, 2), f"tpWorldSize should be at most 2, got {a.tp_world_size}")
    require(
        a.global_bs % ranks == 0 and (not a.global_bs or a.global_bs >= rows * ranks),
        f"globalBs should be 0 or the most rows of a rank times {ranks}, got {a.global_bs} with {rows} rows",
    )
    mask = a.x_active_mask
    if mask is not None:
        require(mask.shape[:1] == (rows,), f"x_active_mask should have {rows} rows, got {shape(mask)}")
        require(a.global_bs <= rows * ranks, "x_active_mask should be absent where ranks have unequal rows")
    require(
        scales is None or scales.dtype == torch.float32,
        f"expert_scales should be float32, got {'' if scales is None else name_of(scales.dtype)}",
        Layer.PARAMETER,
    )


def _check_window(call: Call, a: Arguments, hidden: int, group: Group) -> None:
    """Raises R94 when the group's buffer is smaller than what ranks may send: an A3's tiling refuses, an A2's warns at
    most (CANN 9.1) and its kernel writes past the end. Up to CANN 8.5 the variable counts, later the group's own."""
    rows, ranks, choices = _most_rows(a), a.ep_world_size, a.expert_ids.size(1)
    local = a.moe_expert_num // ranks
    if call.context.card == "A3":
        sent = _aligned(_aligned(2 * hidden, 32) + 44, 512) * local * rows * ranks
        needed = 2 * (sent + _aligned(2 * hidden, 512) * rows * choices)
    else:
        needed = 2 * (rows * ranks * min(local, choices) * hidden * 2 + 2 * MIB)
    text = os.environ.get("HCCL_BUFFSIZE", "")
    window = group.window if call.context.cann >= "9" else int(text or 200) * MIB
    if needed > window:
        sentence = (
            f"HCCL_BUFFSIZE is too SMALL, maxBs = {rows}, h = {hidden}, epWorldSize = {ranks}, localMoeExpertNum = "
            f"{local}, k = {choices}, NEEDED_HCCL_BUFFSIZE = {needed // MIB + 1}MB, HCCL_BUFFSIZE={window // MIB}MB"
        )
        call.reject(94, sentence) if call.context.card == "A3" else call.undefined(94, sentence)


def _group(call: Call, a: Arguments) -> Group:
    """The communicator. Raises NotEmulatedError for what is not computed here."""
    if call.context.group is None:
        raise NotEmulatedError(f"{call.op}: the emulator has no machine of {a.ep_world_size} ranks")
    asked = {
        "comm_alg": getattr(a, "comm_alg", "") not in ("", "fullmesh"),
        "elastic_info": a.elastic_info is not None,
        "shared experts": a.shared_expert_rank_num,
        "special experts": a.zero_expert_num or a.copy_expert_num or a.const_expert_num,
        "a TP domain": a.tp_world_size > 1,
        "quantisation": getattr(a, "quant_mode", 0) or getattr(a, "comm_quant_mode", 0),
        "x_active_mask by choice": a.x_active_mask is not None and a.x_active_mask.dim() > 1,
    }
    if unknown := [name for name, wanted in asked.items() if wanted]:
        raise NotEmulatedError(f"{call.op} with {', '.join(unknown)} is not emulated")
    group = call.context.group(a.group_ep)
    call.require(group is not None, 65, f"group_ep should name a communicator, got {a.group_ep!r}")
    call.require(
        (group.ranks, group.rank) == (a.ep_world_size, a.ep_rank_id),
        65,
        f"ep_world_size and ep_rank_id should be those of the group, {group.ranks} and {group.rank}, got "
        f"{a.ep_world_size} and {a.ep_rank_id}",
    )
    return group


def _active(call: Call, a: Arguments) -> int:
    """Rows that travel: the kernel counts the mask's ones and takes as many from the front."""
    if a.x_active_mask is None:
        return a.expert_ids.size(0)
    count = int(a.x_active_mask.sum())
    if not a.x_active_mask[:count].all():
        call.undefined(65, "x_active_mask should have its ones in front: others are taken for their number only")
    return count


def _only_checked(call: Call) -> NoReturn:
    raise NotEmulatedError(f"{call.op}: only version 2 is computed")


@kernel(
    f"npu::npu_moe_distribute_dispatch(Tensor x, Tensor expert_ids, {_GROUP}, *, Tensor? scales=None, "
    f"Tensor? x_active_mask=None, Tensor? expert_scales=None, {_TAIL}, int quant_mode=0, int global_bs=0, "
    f"int expert_token_nums_type=1) -> {_SEVEN}",
    bundle=True,
)
def moe_distribute_dispatch(a: Arguments) -> NoReturn:
    call = Call.of("npu_moe_distribute_dispatch", "aclnnMoeDistributeDispatch")
    _check(call, a, a.x, a.expert_scales, a.x.size(-1))
    _only_checked(call)


@kernel(
    f"npu::npu_moe_distribute_dispatch_v2(Tensor x, Tensor expert_ids, {_GROUP}, *, Tensor? scales=None, "
    f"Tensor? x_active_mask=None, Tensor? expert_scales=None, Tensor? elastic_info=None, {_TAIL}, int quant_mode=0, "
    f"int global_bs=0, int expert_token_nums_type=1, {_SPECIAL}) -> {_SEVEN}",
    bundle=True,
)
def moe_distribute_dispatch_v2(a: Arguments) -> tuple[torch.Tensor, ...]:
    """x [rows, H], expert_ids [rows, K] -> rows [A, H] by expert, scales, assist_info, rows of each expert (their sums
    so far for expert_token_nums_type 0), sums of rows so far for (expert, rank), and two that stay unwritten. A: as
    many rows as may come; those behind the last one that came are not written."""
    call = Call.of("npu_moe_distribute_dispatch_v2", "aclnnMoeDistributeDispatchV2")
    _check(call, a, a.x, a.expert_scales, a.x.size(-1))
    group = _group(call, a)
    call.require(
        a.x.dtype == torch.float16 or call.context.stands_for(a.x.dtype, torch.bfloat16),
        65,
        f"x should be bfloat16 or float16, got {name_of(a.x.dtype)}",
        Layer.BINDING,
    )
    call.require(a.expert_ids.dtype == torch.int32, 65, "expert_ids should be int32", Layer.BINDING)
    hidden, (own, choices), ranks = a.x.size(1), a.expert_ids.shape, group.ranks
    _check_window(call, a, hidden, group)
    local, rows = a.moe_expert_num // ranks, _most_rows(a)
    room = rows * ranks * min(local, choices)
    came = poisoned((room, hidden), a.x)
    assist = poisoned((max(own * choices, room * 128),), a.expert_ids)
    numbers = poisoned((local,), a.expert_ids, torch.int64)
    received = poisoned((ranks * local,), a.expert_ids)
    unwritten = poisoned((room,), a.x, torch.float32)
    if call.context.execute:
        active = _active(call, a)
        if not bool(((a.expert_ids >= 0) & (a.expert_ids < a.moe_expert_num))[:active].all()):
            call.undefined(65, f"expert_ids should be in [0, {a.moe_expert_num}): others are sent past the last rank")
        ids, x = a.expert_ids.new_full((rows, choices), -1), a.x.new_zeros((rows, hidden))
        ids[:active], x[:active] = a.expert_ids[:active], a.x[:active]
        ids, x = (torch.stack(group.gather(call.op, each)) for each in (ids, x))
        places = ((ids.flatten() >= group.rank * local) & (ids.flatten() < (group.rank + 1) * local)).nonzero()[:, 0]
        places = places[ids.flatten()[places].sort(stable=True).indices]
        rank, token, choice = places // (rows * choices), places // choices % rows, places % choices
        count = len(places)
        came[:count] = x[rank, token]
        assist[: count * TRIPLE] = torch.stack((rank, token, choice), 1).flatten()
        expert = ids.flatten()[places].long() - group.rank * local
        received[:] = torch.bincount(expert * ranks + rank, minlength=ranks * local).cumsum(0)
        numbers[:] = torch.bincount(expert, minlength=local)
        numbers[:] = numbers.cumsum(0) if a.expert_token_nums_type == 0 else numbers
    tp = poisoned((a.tp_world_size,), a.expert_ids)
    return came, unwritten, assist, numbers, received, tp, unwritten.clone()


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
    _only_checked(call)


@kernel(
    "npu::npu_moe_distribute_combine_v2(Tensor expand_x, Tensor expert_ids, Tensor assist_info_for_combine, "
    f"Tensor ep_send_counts, Tensor expert_scales, {_GROUP}, *, Tensor? tp_send_counts=None, "
    "Tensor? x_active_mask=None, Tensor? expand_scales=None, Tensor? shared_expert_x=None, Tensor? elastic_info=None, "
    "Tensor? ori_x=None, Tensor? const_expert_alpha_1=None, Tensor? const_expert_alpha_2=None, "
    f"Tensor? const_expert_v=None, {_TAIL}, int global_bs=0, int comm_quant_mode=0, {_SPECIAL}) -> Tensor",
    bundle=True,
)
def moe_distribute_combine_v2(a: Arguments) -> torch.Tensor:
    """expand_x [A, H] as dispatch sent it, through the experts -> [rows, H]: the sum over the choices of scale * row in
    float32, rounded once. Rows that the mask leaves out are not written."""
    call = Call.of("npu_moe_distribute_combine_v2", "aclnnMoeDistributeCombineV2")
    _check(call, a, a.expand_x, a.expert_scales, a.expand_x.size(-1))
    group = _group(call, a)
    call.require(a.shared_expert_x is None, 65, "shared_expert_x is not emulated", Layer.BINDING)
    own, choices = a.expert_ids.shape
    result = poisoned((own, a.expand_x.size(1)), a.expand_x)
    if not call.context.execute:
        return result
    counts = [int(each) for each in group.gather(call.op, a.ep_send_counts[-1:])]
    call.require(
        max(counts) <= a.expand_x.size(0), 65, f"ep_send_counts should fit expand_x {shape(a.expand_x)}, got {counts}"
    )
    most = max(1, *counts)
    rows = group.gather(call.op, a.expand_x[:most])
    origins = group.gather(call.op, a.assist_info_for_combine[: most * TRIPLE])
    back = poisoned((own, choices, a.expand_x.size(1)), a.expand_x, torch.float32)
    for count, sent, origin in zip(counts, rows, origins, strict=True):
        rank, token, choice = origin[: count * TRIPLE].view(-1, TRIPLE).long().unbind(1)
        mine = rank == group.rank
        back[token[mine], choice[mine]] = sent[:count][mine].float()
    active = _active(call, a)
    total = torch.zeros_like(back[:active, 0])
    for choice in range(choices):
        total += back[:active, choice] * a.expert_scales[:active, choice, None]
    result[:active] = total.to(result.dtype)
    return result
