"""Dynamic int8 and int8, which vllm-ascend 0.23 traces for its fusions; products of integers are not emulated."""

from __future__ import annotations

import torch
from ascend_emulator.ops import formats
from ascend_emulator.ops.table import kernel, poisoned
from ascend_emulator.rules import Call, Layer, NotEmulatedError

QINT8 = 12  # torch passes torch.qint8 to a Python kernel as this number


@kernel(
    "npu::npu_dynamic_quant(Tensor input, *, Tensor? smooth_scales=None, Tensor? group_index=None, "
    "ScalarType? dst_type=None) -> (Tensor, Tensor)"
)
def dynamic_quant(
    input: torch.Tensor,
    *,
    smooth_scales: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    dst_type: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row of the last dimension: int8 round(x * smooth / scale) and scale = max |x * smooth| / 127, float32."""
    call = Call.of("npu_dynamic_quant", "aclnnDynamicQuantV2")
    _refuse_small_floats(call, [input], dst_type)
    if dst_type not in (None, torch.int8) or group_index is not None:
        raise NotEmulatedError(f"npu_dynamic_quant: the emulator has plain int8 only, got {dst_type}")
    out, scale = poisoned(input.shape, input, torch.int8), poisoned(input.shape[:-1], input, torch.float32)
    if call.context.execute:
        values = input.float() if smooth_scales is None else input.float() * smooth_scales.float()
        rows = values.abs().amax(-1) / 127
        scale.copy_(rows)
        out.copy_((values / rows.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).round())
    return out, scale


def _refuse_small_floats(call: Call, tensors: list[torch.Tensor], *dtypes: torch.dtype | None) -> None:
    small = formats.small_floats(tensors, *dtypes)
    call.require(
        not small, 80, f"Atlas A2 has no {', '.join(small)}: these types begin with Ascend 950", Layer.PARAMETER
    )


@kernel(
    "npu::npu_quantize(Tensor input, Tensor scales, Tensor? zero_points, ScalarType dtype, int axis=1, "
    "bool div_mode=True) -> Tensor"
)
def quantize(
    input: torch.Tensor,
    scales: torch.Tensor,
    zero_points: torch.Tensor | None,
    dtype: torch.dtype,
    axis: int = 1,
    div_mode: bool = True,
) -> torch.Tensor:
    """int8 of input / scales + zero_points (div_mode) or input * scales + zero_points, along the last dimension.

    vllm-ascend 0.23 always runs it, when it registers its compiler's patterns.
    """
    call = Call.of("npu_quantize", "aclnnAscendQuantV3")
    _refuse_small_floats(call, [input], dtype)
    if dtype not in (torch.qint8, torch.int8, QINT8) or axis not in (-1, input.dim() - 1):
        raise NotEmulatedError(f"npu_quantize: only int8 along the last dimension is emulated, not {dtype}, {axis}")
    out = poisoned(input.shape, input, torch.int8)
    if call.context.execute:
        scaled = input.float() / scales.float() if div_mode else input.float() * scales.float()
        offset = 0 if zero_points is None else zero_points.float()
        out.copy_((scaled + offset).round().clamp(-128, 127))
    return out
