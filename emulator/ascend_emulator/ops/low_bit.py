"""Weight-only matmul, int4 packing, dynamic int8, and refusals of 8-bit and 4-bit floats, which a 910B lacks."""

from __future__ import annotations

from typing import NoReturn

import torch
from ascend_emulator.ops import formats
from ascend_emulator.ops.table import Arguments, kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

QINT8 = 12  # torch passes torch.qint8 to a Python kernel as this number

WIDEST = 65535
SMALLEST_GROUP = 32


@kernel(
    "npu::npu_weight_quant_batchmatmul(Tensor x, Tensor weight, Tensor antiquant_scale, Tensor? antiquant_offset=None, "
    "Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? bias=None, int antiquant_group_size=0, "
    "int inner_precise=0) -> Tensor"
)
def weight_quant_batchmatmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    antiquant_scale: torch.Tensor,
    antiquant_offset: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    antiquant_group_size: int = 0,
    inner_precise: int = 0,
) -> torch.Tensor:
    """x [M, K] @ ((weight + offset) * scale) [K, N] + bias; weight int8, or int4 packed eight to an int32 along N."""
    call = Call.of("npu_weight_quant_batchmatmul", "aclnnWeightQuantBatchMatmulV2")
    packed, nz = weight.dtype == torch.int32, formats.is_nz(weight)
    sizes = f"x {shape(x)}, weight {shape(weight)}, antiquant_scale {shape(antiquant_scale)}"
    call.require(x.dim() == weight.dim() == 2, 78, f"x and weight should have two dimensions: {sizes}", Layer.PARAMETER)
    call.require(x.numel() and weight.numel(), 78, f"no tensor should be empty: {sizes}", Layer.PARAMETER)
    inner, columns = x.size(1), weight.size(1) * (8 if packed else 1)
    call.require(
        max(inner, columns) <= WIDEST and weight.size(0) == inner,
        78,
        f"K and N should be at most {WIDEST} and agree: {sizes}",
        Layer.PARAMETER,
    )
    group = antiquant_group_size
    call.require(
        group == 0 or (SMALLEST_GROUP <= group <= inner - 1 and group % 32 == 0),
        78,
        f"antiquant_group_size should be 0, or a multiple of 32 from 32 to K - 1 = {inner - 1}, got {group}",
        Layer.PARAMETER,
    )
    wanted = [[-(-inner // group), columns]] if group else [[columns], [1, columns]]
    call.require(
        list(antiquant_scale.shape) in wanted,
        78,
        f"antiquant_scale should be {' or '.join(map(str, wanted))}, got {shape(antiquant_scale)}",
        Layer.PARAMETER,
    )
    call.require(
        antiquant_offset is None or antiquant_offset.shape == antiquant_scale.shape,
        78,
        f"antiquant_offset should be {shape(antiquant_scale)}, got {shape(antiquant_offset)}",
        Layer.PARAMETER,
    )
    call.require(
        bias is None or bias.dtype == (torch.float32 if x.dtype == torch.bfloat16 else x.dtype),
        78,
        f"bias should be float32 for bfloat16 x and float16 for float16, got {shape(bias)} for {name_of(x.dtype)} x",
        Layer.PARAMETER,
    )
    call.require(
        quant_scale is None or not (nz or antiquant_scale.dtype == torch.int64),
        78,
        "quant_scale should be None with a FRACTAL_NZ weight or an int64 antiquant_scale",
        Layer.PARAMETER,
    )
    if nz and packed and group:
        call.require(
            group in (64, 128) and inner % group == 0 and columns % 64 == 0,
            78,
            f"FRACTAL_NZ int4 takes groups of 64 or 128 that divide K, and N % 64 == 0: got {group}, {sizes}",
            Layer.PARAMETER,
        )
    if quant_scale is not None or antiquant_scale.dtype == torch.int64:
        raise NotEmulatedError("npu_weight_quant_batchmatmul: the emulator has no quantised output")
    out = poisoned((x.size(0), columns), x)
    if call.context.execute:
        values = (formats.unpack_int4(weight) if packed else weight).float()
        scale, offset = (
            None
            if t is None
            else (t.float().repeat_interleave(group, 0)[:inner] if group else t.float().reshape(1, -1))
            for t in (antiquant_scale, antiquant_offset)
        )
        values = call.context.rounded((values if offset is None else values + offset) * scale, x.dtype).float()
        result = x.float() @ values
        out.copy_(result if bias is None else result + bias.float())
    return out


@kernel("npu::npu_convert_weight_to_int4pack(Tensor weight, int inner_k_tiles=0) -> Tensor")
def convert_weight_to_int4pack(weight: torch.Tensor, inner_k_tiles: int = 0) -> torch.Tensor:
    """int32 [K, N] of values -8..7 -> int32 [K, N / 8]."""
    call = Call.of("npu_convert_weight_to_int4pack", "aclnnConvertWeightToINT4Pack")
    call.require(
        weight.dtype == torch.int32 and weight.dim() == 2 and weight.is_contiguous(),
        79,
        f"weight should be contiguous int32 [K, N], got {name_of(weight.dtype)} {shape(weight)} with strides "
        f"{list(weight.stride())}",
        Layer.BINDING,
    )
    call.require(
        weight.size(-1) % 8 == 0, 79, f"the last size should be a multiple of 8, got {shape(weight)}", Layer.BINDING
    )
    out = poisoned((weight.size(0), weight.size(1) // 8), weight)
    if call.context.execute:
        if weight.numel() and not -8 <= int(weight.min()) <= int(weight.max()) <= 7:
            call.undefined(79, f"values should be -8 to 7, got {int(weight.min())} to {int(weight.max())}")
        out.copy_(formats.pack_int4(weight))
    return out


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


# absent in torch_npu 2.7.1; 26.0.0 has them, for Ascend 950
@kernel(
    'npu::npu_dynamic_mx_quant(Tensor input, *, int axis=-1, str round_mode="rint", int dst_type=296, '
    "int block_size=32, int? scale_alg=0, float dst_type_max=0.0) -> (Tensor, Tensor)",
    bundle=True,
)
def dynamic_mx_quant(a: Arguments) -> NoReturn:
    _refuse_mx(Call.of("npu_dynamic_mx_quant", "aclnnDynamicMxQuant"), a.input)


@kernel(
    'npu::npu_dynamic_block_mx_quant(Tensor input, *, str round_mode="rint", int dst_type=296, '
    "int scale_alg=0, float dst_type_max=0.0) -> (Tensor, Tensor, Tensor)",
    bundle=True,
)
def dynamic_block_mx_quant(a: Arguments) -> NoReturn:
    _refuse_mx(Call.of("npu_dynamic_block_mx_quant", "aclnnDynamicBlockMxQuant"), a.input)


def _refuse_mx(call: Call, tensor: torch.Tensor) -> NoReturn:
    call.reject(80, f"Atlas A2 has no MX formats: got {name_of(tensor.dtype)} {shape(tensor)}", Layer.PARAMETER)
    raise AssertionError("R80 holds on every version")
