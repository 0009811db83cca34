"""Experts from the layout of the Triton kernels back in the checkpoint's, for a call that is replayed from a file."""

from __future__ import annotations

import torch

from npu_gptoss.moe import AnyExperts, ExpertWeights, Fp8Experts, Mxfp4Experts
from npu_gptoss.moe.triton.layout import (
    BAND,
    EXPONENT_SHIFT,
    FP8_BITS,
    MXFP4_BITS,
    ROWS,
    TiledExperts,
    TiledMatrix,
    neighbours,
)


def untiled(experts: TiledExperts) -> AnyExperts:
    """The inverse of `npu_gptoss.moe.triton.layout.prepare`."""
    shared = {
        "gate_up_proj_bias": _unbanded(experts.gate_up.bias),
        "down_proj_bias": experts.down.bias,
        "expert_map": None if experts.expert_map is None else experts.expert_map.long(),
    }
    gate_up, down = _values(experts.gate_up), _values(experts.down)
    gate_up = _unbanded(gate_up)
    if experts.format == Mxfp4Experts.format:
        pairs = (codes.unflatten(-1, (-1, 16, 2)) for codes in (gate_up, down))
        blocks = [(each[..., 0] | each[..., 1] << 4).to(torch.uint8) for each in pairs]
        scales = _unbanded(_exponents(experts.gate_up)), _exponents(experts.down)
        return Mxfp4Experts(
            gate_up_proj_blocks=blocks[0],
            gate_up_proj_scales=scales[0],
            down_proj_blocks=blocks[1],
            down_proj_scales=scales[1],
            **shared,
        )
    if experts.format == Fp8Experts.format:
        raw = (each.to(torch.uint8).view(torch.float8_e4m3fn) for each in (gate_up, down))
        scales = {"gate_up_proj_scales": _unbanded(experts.gate_up.scales), "down_proj_scales": experts.down.scales}
        return Fp8Experts(**dict(zip(("gate_up_proj", "down_proj"), raw, strict=True)), **scales, **shared)
    return ExpertWeights(gate_up.mT.contiguous(), down_proj=down.mT.contiguous(), **shared)


def _values(matrix: TiledMatrix) -> torch.Tensor:
    """[experts, rows, inputs]: codes of MXFP4, bytes of FP8, or bfloat16."""
    words = matrix.words.transpose(2, 3).flatten(1, 2)[:, : matrix.rows]  # [experts, rows, input tiles, n]
    if words.dtype == torch.uint16:
        words = words.view(torch.int16).to(torch.int32) & 0xFFFF
        four = words.shape[-1] == 16
        values = [torch.zeros_like(words)] * (5 if four else 2)
        for number, bits, by in MXFP4_BITS if four else FP8_BITS:
            values[number] = values[number] | words >> by & bits
        if four:
            values[2] = values[2] | neighbours(values.pop())
        words = torch.stack(values, -2).flatten(-2)
    return words.flatten(2)[..., : matrix.inputs]


def _exponents(matrix: TiledMatrix) -> torch.Tensor:
    """[experts, rows, inputs / 32]: the scales of MXFP4."""
    scales = matrix.scales.contiguous().view(torch.uint8).unflatten(-1, (ROWS, 4))
    scales = scales.transpose(2, 3).flatten(1, 2)[:, : matrix.rows].flatten(2)
    return (scales - EXPONENT_SHIFT)[..., : matrix.inputs // 32]


def _unbanded(rows: torch.Tensor) -> torch.Tensor:
    """The inverse of `bands`."""
    return rows.unflatten(1, (-1, 2, BAND)).transpose(2, 3).flatten(1, 3)
