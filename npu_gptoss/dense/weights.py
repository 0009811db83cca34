"""A projection's weight: a plain matrix, or eight-bit values with one scale a row (weight-only FP8)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from npu_gptoss.errors import InputError

FP8_DTYPE = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8_DTYPE).max


@dataclass(frozen=True)
class RowScaled:
    """values [out, in] float8_e4m3fn, scales [out] float32: row i of the matrix is values[i] * scales[i]."""

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dtype != FP8_DTYPE or self.values.dim() != 2:
            raise InputError(f"values must be [out, in] in {FP8_DTYPE}, got {self.values.dtype} of {self.values.dim()}")
        if self.scales.shape != self.values.shape[:1] or self.scales.dtype != torch.float32:
            raise InputError(f"scales must be [{self.values.shape[0]}] float32, got {list(self.scales.shape)}")

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype


Weight = torch.Tensor | RowScaled


def quantize_rows(weight: torch.Tensor, rows_at_once: int = 16384) -> RowScaled:
    """weight [out, in] -> FP8 with the scale that puts each row's largest value at FP8's largest."""
    values = torch.empty(weight.shape, dtype=FP8_DTYPE, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], rows_at_once):
        piece = weight[start : start + rows_at_once].float()
        scale = (piece.abs().amax(dim=1) / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny)
        scales[start : start + rows_at_once] = scale
        values[start : start + rows_at_once] = (piece / scale[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8_DTYPE)
    return RowScaled(values, scales)


def expanded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [out, in] in `dtype`; a plain weight in that dtype is returned as it is."""
    if isinstance(weight, RowScaled):
        return (weight.values.float() * weight.scales[:, None]).to(dtype)
    return weight.to(dtype)
