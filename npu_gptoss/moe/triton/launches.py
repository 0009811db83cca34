"""Launches of the MoE kernels. Nothing here waits for the device, and every grid depends on shapes alone."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton

from npu_gptoss.kernels.triton_launch import INTERPRETED, launch, processors
from npu_gptoss.moe.adapters import ExpertAdapters
from npu_gptoss.moe.triton import few, many, routing
from npu_gptoss.moe.triton.layout import INPUTS, Call, TiledExperts, TiledMatrix, call_of
from npu_gptoss.moe.triton.tuned import Tiles, few_gluon_tiles, gluon_tiles, one_gluon_tiles, tiles, unroll

# Slots that one program of the sort looks at, times experts: what a program holds in registers
_SORT_CELLS = 1 << 14
_SORT_PROGRAMS = 128  # at most: each reads what all others counted
_COMBINE_ROWS = 1024
_FEW_SLOTS = 2048  # up to so many the inputs are shared out among programs, to fill the GPU


def _constants(matrix: TiledMatrix, shape: Tiles) -> dict[str, Any]:
    tiles_of_inputs = -(-matrix.inputs // INPUTS)
    unrolled = unroll(tiles_of_inputs, shape.unroll)
    steps = -(-tiles_of_inputs // unrolled)
    return {
        "R": matrix.rows,
        "K": matrix.inputs,
        "BM": shape.rows,
        "BN": shape.columns,
        "UNROLL": unrolled,
        # From 16 columns on products run beside what follows. One for a step of a packed format would read registers
        # that the next step opens its weights into; of two, the second begins when the first has ended.
        "HALVES": matrix.scales is not None and unrolled == 1 and shape.columns >= 16,
        # never more stages than steps: with Triton 3.6 a loop of two steps in three stages gave other numbers in each
        # run on an H200 (128 columns, intermediate size 128)
        "STAGES": min(shape.stages, steps),
        "NATIVE": not INTERPRETED,
    }


def route(logits: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> weights [tokens, top_k] float32, ids [tokens, top_k] int32."""
    tokens, experts = logits.shape
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    if tokens:
        rows = 1 if tokens <= 256 else 8
        launch(
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


def _scales(matrix: TiledMatrix) -> torch.Tensor:
    return matrix.bias if matrix.scales is None else matrix.scales


def _assigned(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Each local expert's slots [experts, slots] int32, and how many they are [experts] int32."""
    experts, device = call.experts.num_experts, call.topk_ids.device
    lists = torch.empty(experts, call.slots, dtype=torch.int32, device=device)
    counts = torch.empty(experts, dtype=torch.int32, device=device)
    launch(
        few.assign,
        (experts,),
        (call.topk_ids, call.expert_map, lists, counts, call.slots),
        warps=4,
        HAS_MAP=call.has_map,
        BS=max(triton.next_power_of_2(call.slots), 128),  # no fewer elements than threads
    )
    return lists, counts


def gluon_one(**arguments: Any) -> torch.Tensor:
    """Three launches for a single token."""
    from npu_gptoss.moe.triton import one_hopper

    call = call_of(**arguments)
    return _combined(one_hopper.shares_of(call, one_gluon_tiles()), call)


def gluon_few(**arguments: Any) -> torch.Tensor:
    """Four launches."""
    from npu_gptoss.moe.triton import few_hopper

    call = call_of(**arguments)
    shares = few_hopper.shares_of(call, *_assigned(call), few_gluon_tiles(len(call.hidden)))
    return _combined(shares, call)


def triton_few(*, one: bool = False, **arguments: Any) -> torch.Tensor:
    """Four launches; one: a single token's three."""
    call = call_of(**arguments)
    lists, counts = (call.topk_ids, call.topk_ids) if one else _assigned(call)
    hidden, experts, slots = call.hidden, call.experts, call.slots
    gate_up, down = experts.gate_up, experts.down
    up_shape, down_shape = tiles(experts.format, "few", len(hidden))
    splits = down_shape.splits
    inner = hidden.new_empty(slots, down.inputs)
    shares = torch.empty(slots, splits, down.rows, dtype=torch.float32, device=hidden.device)
    common = {
        "FORMAT": experts.format,
        "HAS_MAP": call.has_map,
        "ONE": one,
        "EXPERTS": experts.num_experts,
        "BE": triton.next_power_of_2(experts.num_experts),
    }
    routing = (call.topk_ids, call.expert_map, lists, counts)
    programs = slots if one else min(slots, experts.num_experts)
    launch(
        few.gate_up,
        (triton.cdiv(gate_up.rows, up_shape.rows), programs),
        (hidden, *routing, gate_up.words, _scales(gate_up), gate_up.bias, inner, slots, call.swiglu_limit),
        warps=up_shape.warps,
        TOP_K=call.top_k,
        **common,
        **_constants(gate_up, up_shape),
    )
    launch(
        few.down,
        (triton.cdiv(down.rows, down_shape.rows), programs, splits),
        (inner, *routing, call.topk_weights, down.words, _scales(down), down.bias, shares, slots),
        warps=down_shape.warps,
        SPLITS=splits,
        **common,
        **_constants(down, down_shape),
    )
    return _combined(shares, call)


triton_one = functools.partial(triton_few, one=True)


def triton_many(adapters: ExpertAdapters | None = None, **arguments: Any) -> torch.Tensor:
    """Five launches: two for the sort, the two products, the sum; with adapters one more before each product."""
    call = call_of(**arguments)
    experts, slots = call.experts, call.slots
    order, ends, inner, shares = _sorted(call)
    shapes = tiles(experts.format, "many", len(call.hidden))
    products = ((call.hidden, experts.gate_up, inner), (inner, experts.down, shares))
    for (x, matrix, out), shape in zip(products, shapes, strict=True):
        common = {
            "GATE_UP": matrix is experts.gate_up,
            "TOP_K": call.top_k,
            "EXPERTS": experts.num_experts,
            "BE": ends.shape[0],
        }
        added, ranks = (order, order, order), {"ADAPTERS": 0, "RANK": 0, "SHARES": 0}
        if adapters is not None:
            added, ranks = _shrunk(call, adapters, x, order, ends, common)
        launch(
            many.grouped,
            (triton.cdiv(matrix.rows, shape.rows) * _most_tiles(call, shape.columns),),
            (
                *(x, order, ends, call.topk_weights, matrix.words, _scales(matrix), matrix.bias, out),
                *(call.swiglu_limit, *added, slots),
            ),
            warps=shape.warps,
            FORMAT=experts.format,
            **common,
            **ranks,
            **_constants(matrix, shape),
        )
    return _combined(shares, call)


def _most_tiles(call: Call, columns: int) -> int:
    """Bounds the tiles of all experts' groups: full ones, and one of each expert that is not."""
    return call.slots // columns + min(call.experts.num_experts, call.slots)


def _shrunk(
    call: Call, adapters: ExpertAdapters, x: torch.Tensor, order: torch.Tensor, ends: torch.Tensor, common: dict
) -> tuple[tuple[torch.Tensor, ...], dict[str, int]]:
    """The arguments of `many.grouped` for adapters: which of each token, B, and A x of the projection's inputs."""
    pair = adapters.gate_up if common["GATE_UP"] else adapters.down
    count, _, rank, inputs = pair.a.shape
    few_slots = call.slots <= _FEW_SLOTS
    ranks = {"ADAPTERS": count, "RANK": rank, "SHARES": 8 if few_slots else 1}
    low = torch.empty(ranks["SHARES"], call.slots, rank, dtype=torch.float32, device=x.device)
    columns, rows = 16 if few_slots else 64, min(rank, 64)
    launch(
        many.shrink,
        (_most_tiles(call, columns), ranks["SHARES"], rank // rows),
        (x, order, ends, adapters.of_token, pair.a, low, call.slots),
        warps=4,
        K=inputs,
        BM=rows,
        BN=columns,
        BK=64,
        NATIVE=not INTERPRETED,
        **common,
        **ranks,
    )
    return (adapters.of_token, pair.b, low), ranks


def gluon_many(**arguments: Any) -> torch.Tensor:
    """Five launches, as `triton_many`."""
    from npu_gptoss.moe.triton import many_hopper

    call = call_of(**arguments)
    order, ends, inner, shares = _sorted(call)
    hidden, experts = call.hidden, call.experts
    all_ranks_experts = experts.num_experts if experts.expert_map is None else experts.expert_map.numel()
    shape = gluon_tiles(call.slots, all_ranks_experts)
    for x, matrix, out in ((hidden, experts.gate_up, inner), (inner, experts.down, shares)):
        many_hopper.product[(processors(hidden.device),)](
            *(x, order, ends, call.topk_weights, matrix.words, matrix.scales, matrix.bias, out, call.swiglu_limit),
            GATE_UP=x is hidden,
            TOP_K=call.top_k,
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
    return _combined(shares, call)


def _sorted(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The slots in the order of their experts, where each expert's end, and memory for both products' results."""
    padded_experts = triton.next_power_of_2(call.experts.num_experts)
    order, ends = sorted_slots(call.topk_ids, call.expert_map, call.experts, padded_experts)
    down = call.experts.down
    inner, shares = (call.hidden.new_empty(call.slots, size) for size in (down.inputs, down.rows))
    return order, ends, inner, shares


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
    launch(many.count, (programs,), (topk_ids, expert_map, counts, slots, rounds), warps=8, **common)
    launch(
        many.place,
        (programs,),
        (topk_ids, expert_map, counts, order, ends, slots, rounds, programs),
        warps=8,
        BP=16,
        **common,
    )
    return order, ends


def _combined(shares: torch.Tensor, call: Call) -> torch.Tensor:
    rows, splits = shares.shape[-1], shares.shape[1] if shares.dim() == 3 else 1
    block = min(triton.next_power_of_2(rows), _COMBINE_ROWS)
    out = call.hidden.new_empty(call.hidden.shape[0], rows)
    launch(
        routing.combine,
        (triton.cdiv(rows, block), call.hidden.shape[0]),
        (shares, call.topk_ids, call.expert_map, out),
        warps=4,
        TOP_K=call.top_k,
        HAS_MAP=call.has_map,
        SPLITS=splits,
        R=rows,
        BR=block,
    )
    return out
