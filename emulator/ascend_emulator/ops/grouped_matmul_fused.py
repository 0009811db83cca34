"""The fused grouped matmuls, which take integer weights only: the refusals of other types."""

from __future__ import annotations

from typing import NoReturn

import torch
from ascend_emulator.ops import formats
from ascend_emulator.ops.table import Arguments, kernel, name_of, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

WIDEST_OUTPUT = 10240


def _check(call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> NoReturn:
    call.require(
        x.dtype == torch.int8,
        64,
        f"x should be int8, got {name_of(x.dtype)} {shape(x)}: there is no float form of this operator",
        Layer.PARAMETER,
    )
    call.require(bias is None, 64, f"bias should be None, got {shape(bias)}", Layer.PARAMETER)
    columns = weight.size(-1) * (8 if weight.dtype == torch.int32 else 1)
    call.require(
        columns <= WIDEST_OUTPUT,
        64,
        f"N should be at most {WIDEST_OUTPUT}, got {columns} in {shape(weight)}",
        Layer.PARAMETER,
    )
    call.require(
        weight.dtype != torch.int8 or formats.is_nz(weight),
        64,
        f"an int8 weight should be in FRACTAL_NZ, got ND {shape(weight)}",
        Layer.PARAMETER,
    )
    raise NotEmulatedError(f"{call.op}: the emulator has no integer matmul")


@kernel(
    "npu::npu_grouped_matmul_finalize_routing(Tensor x, Tensor w, Tensor group_list, *, Tensor? scale=None, Tensor? "
    "bias=None, Tensor? offset=None, Tensor? pertoken_scale=None, Tensor? shared_input=None, Tensor? logit=None, "
    "Tensor? row_index=None, ScalarType? dtype=None, float? shared_input_weight=1.0, int? shared_input_offset=0, int? "
    "output_bs=0, int? group_list_type=1, int[]? tuning_config=None) -> Tensor",
    bundle=True,
)
def grouped_matmul_finalize_routing(a: Arguments) -> NoReturn:
    call = Call.of("npu_grouped_matmul_finalize_routing", "aclnnGroupedMatmulFinalizeRoutingV3")
    _check(call, a.x, a.w, a.bias)


@kernel(
    "npu::npu_grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor group_list, Tensor weight_scale, Tensor "
    "x_scale, *, Tensor? bias=None, Tensor? offset=None) -> (Tensor, Tensor, Tensor)",
    bundle=True,
)
def grouped_matmul_swiglu_quant(a: Arguments) -> NoReturn:
    _check(Call.of("npu_grouped_matmul_swiglu_quant", "aclnnGroupedMatmulSwigluQuant"), a.x, a.weight, a.bias)
