"""One layer's experts of gpt-oss-120b at full size on the emulated 910B, packed and expanded.
test_layer_of_120b.py starts it: layer_of_120b.py FILE.

FILE gets the layer's results of both ways. The two ways have the device one after the other: each takes 11 GB of it.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy
import torch
import torch_npu  # noqa: F401  (makes the device)

from npu_gptoss.moe import (
    ExpertWeights,
    Mxfp4Experts,
    PreparedExperts,
    ascend,
    expert_mlp,
    mxfp4,
    prepare_experts,
    route,
)
from npu_gptoss.moe.weights import on_device

EXPERTS, HIDDEN, INNER, TOP_K = 128, 2880, 2880, 4
ROWS = (1, 8, 64)
NPU = torch.device("npu")
SCALES = 118, 123  # the least and the last: weights as large as a checkpoint's


def drawn_experts() -> Mxfp4Experts:
    """On the host: every code, under scales of a few sizes."""
    numbers = numpy.random.default_rng(0)

    def codes(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.integers(0, 256, shape, dtype=numpy.uint8))

    def scales(*shape: int) -> torch.Tensor:
        return torch.from_numpy(numbers.integers(*SCALES, shape, dtype=numpy.uint8))

    def bias(columns: int) -> torch.Tensor:
        return torch.from_numpy(numbers.normal(size=(EXPERTS, columns))).to(torch.bfloat16)

    into, out = (EXPERTS, 2 * INNER, HIDDEN // mxfp4.GROUP), (EXPERTS, HIDDEN, INNER // mxfp4.GROUP)
    return Mxfp4Experts(codes(*into, 16), scales(*into), bias(2 * INNER), codes(*out, 16), scales(*out), bias(HIDDEN))


def expanded(experts: Mxfp4Experts) -> ExpertWeights:
    """The same on the device in BF16, expert by expert: without `pack` and `expand`."""
    made = {
        name: torch.empty(EXPERTS, depth, columns, dtype=torch.bfloat16, device=NPU)
        for name, depth, columns in (("gate_up_proj", HIDDEN, 2 * INNER), ("down_proj", INNER, HIDDEN))
    }
    for name, weight in made.items():
        blocks, scales = getattr(experts, f"{name}_blocks"), getattr(experts, f"{name}_scales")
        for expert in range(EXPERTS):
            weight[expert].copy_(mxfp4.expand(blocks[expert], scales[expert]).t().contiguous())
    return ExpertWeights(
        made["gate_up_proj"], experts.gate_up_proj_bias.to(NPU), made["down_proj"], experts.down_proj_bias.to(NPU)
    )


def step(prepared: PreparedExperts, rows: torch.Tensor, routing: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return expert_mlp(rows, prepared, *routing).cpu()


def free() -> None:
    gc.collect()
    torch.npu.empty_cache()


def main(file: str) -> None:
    generator = torch.Generator().manual_seed(0)
    steps = {
        rows: tuple(torch.randn(rows, n, generator=generator).to(torch.bfloat16).to(NPU) for n in (HIDDEN, EXPERTS))
        for rows in ROWS
    }
    routed = {rows: route(logits, TOP_K) for rows, (_, logits) in steps.items()}
    experts = drawn_experts()
    found: dict[str, Any] = {"routed": {rows: sorted(set(ids.flatten().tolist())) for rows, (_, ids) in routed.items()}}

    packed = prepare_experts(on_device(experts, NPU), kernel="moe.experts.ascend_packed")
    free()
    rooms = packed.weights.gate_up_proj, packed.weights.down_proj
    found["packed"], found["filled"] = {}, {}
    for rows, (hidden, _) in steps.items():
        for room in rooms:
            room.fill_(float("nan"))  # what nobody expands shows
        found["packed"][rows] = step(packed, hidden, routed[rows])
        found["filled"][rows] = [(~room[:, 0, 0].isnan()).nonzero().flatten().tolist() for room in rooms]
    last = found["routed"][1][-1]
    packed.weights.packed[1].scales[last, -1, -1] += 1  # of the last group of the last column
    found["spoilt"] = step(packed, steps[1][0], routed[1])
    del packed, rooms, room
    ascend._rooms.clear()
    free()
    weights = expanded(experts)
    del experts
    plain = prepare_experts(weights, kernel="moe.experts.ascend")
    del weights
    free()
    found["expanded"] = {rows: step(plain, hidden, routed[rows]) for rows, (hidden, _) in steps.items()}
    torch.save(found, file)


if __name__ == "__main__":
    main(sys.argv[1])
