"""From tensors to grids. Nothing here waits for the device, and every grid depends on shapes alone."""

from __future__ import annotations

from typing import Any

import torch
import triton

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.triton_launch import INTERPRETED, has_hopper, launch_options
from npu_gptoss.moe.triton import few, many, routing
from npu_gptoss.moe.triton.combine import combine
from npu_gptoss.moe.triton.layout import INPUTS, MOST_ROWS, TiledExperts, TiledMatrix
from npu_gptoss.moe.triton.tuned import ONE, FewTiles, GluonTiles, Tiles, few_gluon_tiles, gluon_tiles, tiles, unroll

# Slots that one program of the sort looks at, times experts: what a program holds in registers
_SORT_CELLS = 1 << 14
_SORT_PROGRAMS = 128  # at most: each reads what all others counted
_COMBINE_ROWS = 1024
_STAGED_BYTES = 112 * 1024  # of inputs that `few_hopper` keeps in shared memory


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], *, warps: int, **constants: Any) -> None:
    kernel[grid](*arguments, **constants, **launch_options(arguments[0], warps))


def _constants(matrix: TiledMatrix, shape: Tiles) -> dict[str, Any]:
    unrolled = unroll(-(-matrix.inputs // INPUTS), shape.unroll)
    return {
        "R": matrix.rows,
        "K": matrix.inputs,
        "BM": shape.rows,
        "BN": shape.columns,
        "UNROLL": unrolled,
        # never a single product of a packed tile in a loop: see `Tiles.halves`
        "HALVES": shape.halves or (matrix.scales is not None and unrolled == 1 and shape.columns >= 16),
        "STAGES": shape.stages,
        "NATIVE": not INTERPRETED,
    }


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> weights [tokens, top_k] float32, ids [tokens, top_k] int32."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        rows = 1 if tokens <= 256 else 8
        _launch(
            routing.route,
            (triton.cdiv(tokens, rows),),
            (logits.contiguous(), weights, ids, tokens),
            warps=1 if rows == 1 else 4,
            TOP_K=top_k,
            BK=triton.next_power_of_2(top_k),
            EXPERTS=experts,
            BE=triton.next_power_of_2(experts),
            BT=rows,
        )
    return weights, ids


def _inputs(
    hidden: torch.Tensor, experts: TiledExperts, topk_weights: torch.Tensor, topk_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contiguous inputs, and the map (some tensor where there is none: its pointer is not followed)."""
    if hidden.dtype != torch.bfloat16:
        raise InputError(f"hidden_states must be bfloat16 for the Triton kernels, got {hidden.dtype}")
    topk_ids = topk_ids.contiguous()
    expert_map = topk_ids if experts.expert_map is None else experts.expert_map
    return hidden.contiguous(), topk_weights.float().contiguous(), topk_ids, expert_map


def _scales(matrix: TiledMatrix) -> torch.Tensor:
    return matrix.bias if matrix.scales is None else matrix.scales


def _assigned(
    topk_ids: torch.Tensor, expert_map: torch.Tensor, experts: TiledExperts
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each local expert's slots [experts, slots] int32, and how many they are [experts] int32."""
    slots = topk_ids.numel()
    lists = torch.empty(experts.num_experts, slots, dtype=torch.int32, device=topk_ids.device)
    counts = torch.empty(experts.num_experts, dtype=torch.int32, device=topk_ids.device)
    _launch(
        few.assign,
        (experts.num_experts,),
        (topk_ids, expert_map, lists, counts, slots),
        warps=4,
        HAS_MAP=experts.expert_map is not None,
        BS=max(triton.next_power_of_2(slots), 128),  # no fewer elements than threads
    )
    return lists, counts


def expert_mlp_few(
    hidden: torch.Tensor,
    experts: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
    *,
    one: bool,
) -> torch.Tensor:
    """Three launches for a single token (`one`), else four."""
    hidden, topk_weights, topk_ids, expert_map = _inputs(hidden, experts, topk_weights, topk_ids)
    (tokens, top_k), slots = topk_ids.shape, topk_ids.numel()
    if one and one_in_gluon(experts, hidden.device.index):
        from npu_gptoss.moe.triton import one_hopper

        shares = one_hopper.shares_of(hidden, experts, expert_map, topk_weights, topk_ids, swiglu_limit, ONE)
        return _combined(shares, topk_ids, expert_map, experts, hidden, top_k)
    lists, counts = (topk_ids, topk_ids) if one else _assigned(topk_ids, expert_map, experts)
    shape = None if one else few_gluon_tiles(tokens)
    if shape is not None and few_in_gluon(experts, shape, hidden.device.index):
        from npu_gptoss.moe.triton import few_hopper

        shares = few_hopper.shares_of(hidden, experts, lists, counts, topk_weights, swiglu_limit, shape)
        return _combined(shares, topk_ids, expert_map, experts, hidden, top_k)
    gate_up, down = experts.gate_up, experts.down
    up_shape, down_shape = tiles(experts.format, "few", tokens)
    splits = down_shape.splits
    inner = hidden.new_empty(slots, down.inputs)
    shares = torch.empty(slots, splits, down.rows, dtype=torch.float32, device=hidden.device)
    common = {
        "FORMAT": experts.format,
        "HAS_MAP": experts.expert_map is not None,
        "ONE": one,
        "EXPERTS": experts.num_experts,
        "BE": triton.next_power_of_2(experts.num_experts),
    }
    routing = (topk_ids, expert_map, lists, counts)
    programs = slots if one else min(slots, experts.num_experts)
    _launch(
        few.gate_up,
        (triton.cdiv(gate_up.rows, up_shape.rows), programs),
        (hidden, *routing, gate_up.words, _scales(gate_up), gate_up.bias, inner, slots, swiglu_limit),
        warps=up_shape.warps,
        TOP_K=top_k,
        **common,
        **_constants(gate_up, up_shape),
    )
    _launch(
        few.down,
        (triton.cdiv(down.rows, down_shape.rows), programs, splits),
        (inner, *routing, topk_weights, down.words, _scales(down), down.bias, shares, slots),
        warps=down_shape.warps,
        SPLITS=splits,
        **common,
        **_constants(down, down_shape),
    )
    return _combined(shares, topk_ids, expert_map, experts, hidden, top_k)


def expert_mlp_many(
    hidden: torch.Tensor,
    experts: TiledExperts,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """Five launches: two for the sort, the two products, the sum."""
    hidden, topk_weights, topk_ids, expert_map = _inputs(hidden, experts, topk_weights, topk_ids)
    (tokens, top_k), slots = topk_ids.shape, topk_ids.numel()
    gate_up, down = experts.gate_up, experts.down
    padded_experts = triton.next_power_of_2(experts.num_experts)
    order, ends = sorted_slots(topk_ids, expert_map, experts, padded_experts)
    inner = hidden.new_empty(slots, down.inputs)
    shares = hidden.new_empty(slots, down.rows)
    all_ranks_experts = experts.num_experts if experts.expert_map is None else experts.expert_map.numel()
    gluon_shape = gluon_tiles(slots, all_ranks_experts)
    if gluon_shape is not None and gluon_fits(experts, hidden.device.index):
        _products_in_gluon(hidden, experts, topk_weights, order, ends, inner, shares, swiglu_limit, top_k, gluon_shape)
        return _combined(shares, topk_ids, expert_map, experts, hidden, top_k)
    up_shape, down_shape = tiles(experts.format, "many", tokens)
    common = {"FORMAT": experts.format, "EXPERTS": experts.num_experts, "BE": padded_experts}

    def programs(matrix: TiledMatrix, shape: Tiles) -> tuple[int]:
        full_and_last = slots // shape.columns + min(experts.num_experts, slots)
        return (triton.cdiv(matrix.rows, shape.rows) * full_and_last,)

    _launch(
        many.gate_up,
        programs(gate_up, up_shape),
        (hidden, order, ends, gate_up.words, _scales(gate_up), gate_up.bias, inner, swiglu_limit),
        warps=up_shape.warps,
        TOP_K=top_k,
        **common,
        **_constants(gate_up, up_shape),
    )
    _launch(
        many.down,
        programs(down, down_shape),
        (inner, order, ends, topk_weights, down.words, _scales(down), down.bias, shares),
        warps=down_shape.warps,
        **common,
        **_constants(down, down_shape),
    )
    return _combined(shares, topk_ids, expert_map, experts, hidden, top_k)


def one_in_gluon(experts: TiledExperts, device: int | None) -> bool:
    """Whether `one_hopper` computes with these weights on this device."""
    return experts.format == "mxfp4" and has_hopper(device)


def few_in_gluon(experts: TiledExperts, shape: FewTiles, device: int | None) -> bool:
    """Whether `few_hopper` computes with these weights on this device: rows of inputs for all columns must fit into
    what a multiprocessor has of shared memory, of which half is enough for any model here."""
    widest = max(experts.gate_up.inputs, experts.down.inputs)
    return experts.format == "mxfp4" and 2 * widest * shape.slots <= _STAGED_BYTES and has_hopper(device)


def gluon_fits(experts: TiledExperts, device: int | None) -> bool:
    """Whether `many_hopper` can compute with these weights on this device: whole steps of inputs, and more than one of
    them and of the layout's tallest tiles (loops of one are folded, and Triton 3.6 does not compile what is left)."""
    matrices = experts.gate_up, experts.down
    return (
        experts.format == "mxfp4"
        and all(m.inputs % INPUTS == 0 and m.inputs > INPUTS and m.rows > MOST_ROWS for m in matrices)
        and has_hopper(device)
    )


def _products_in_gluon(
    hidden: torch.Tensor,
    experts: TiledExperts,
    topk_weights: torch.Tensor,
    order: torch.Tensor,
    ends: torch.Tensor,
    inner: torch.Tensor,
    shares: torch.Tensor,
    swiglu_limit: float,
    top_k: int,
    shape: GluonTiles,
) -> None:
    """Fills inner and shares."""
    from npu_gptoss.moe.triton import many_hopper

    grid = (torch.cuda.get_device_properties(hidden.device).multi_processor_count,)
    for x, matrix, out in ((hidden, experts.gate_up, inner), (inner, experts.down, shares)):
        many_hopper.product[grid](
            x,
            order,
            ends,
            topk_weights,
            matrix.words,
            matrix.scales,
            matrix.bias,
            out,
            swiglu_limit,
            GATE_UP=x is hidden,
            TOP_K=top_k,
            BE=ends.shape[0],
            R=matrix.rows,
            K=matrix.inputs,
            HEIGHT=shape.rows,
            COLUMNS=shape.columns,
            STAGES=shape.stages,
            COMPUTE_REGISTERS=shape.compute,
            FETCH_REGISTERS=shape.fetch,
            num_warps=4,
        )


def sorted_slots(
    topk_ids: torch.Tensor, expert_map: torch.Tensor, experts: TiledExperts, padded_experts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots by local expert [slots] int32, and where each expert's end [padded experts] int32."""
    slots = topk_ids.numel()
    block = max(_SORT_CELLS // padded_experts, 16)
    rounds = triton.cdiv(slots, block * _SORT_PROGRAMS)
    programs = triton.cdiv(slots, block * rounds)
    counts = torch.empty(programs, padded_experts, dtype=torch.int32, device=topk_ids.device)
    order = torch.empty(slots, dtype=torch.int32, device=topk_ids.device)
    ends = torch.empty(padded_experts, dtype=torch.int32, device=topk_ids.device)
    common = {"HAS_MAP": experts.expert_map is not None, "BE": padded_experts, "BS": block}
    _launch(many.count, (programs,), (topk_ids, expert_map, counts, slots, rounds), warps=8, **common)
    _launch(
        many.place,
        (programs,),
        (topk_ids, expert_map, counts, order, ends, slots, rounds, programs),
        warps=8,
        BP=16,
        **common,
    )
    return order, ends


def _combined(
    shares: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor,
    experts: TiledExperts,
    hidden: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    rows, splits = shares.shape[-1], shares.shape[1] if shares.dim() == 3 else 1
    block = min(triton.next_power_of_2(rows), _COMBINE_ROWS)
    out = hidden.new_empty(hidden.shape[0], rows)
    _launch(
        combine,
        (triton.cdiv(rows, block), hidden.shape[0]),
        (shares, topk_ids, expert_map, out),
        warps=4,
        TOP_K=top_k,
        HAS_MAP=experts.expert_map is not None,
        SPLITS=splits,
        R=rows,
        BR=block,
    )
    return out
