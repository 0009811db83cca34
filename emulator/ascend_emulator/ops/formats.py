"""Storage formats and dtypes of a 910B: npu_format_cast, FRACTAL_NZ weights, and missing float types.

FRACTAL_NZ is only a tag here: numbers keep their logical order, and contracts ask `OpContext.format_of`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, FORMAT_ND, current
from ascend_emulator.ops.table import kernel, name_of, shape
from ascend_emulator.rules import Call, Layer

SMALL_FLOATS = frozenset(
    getattr(torch, name)
    for name in (
        "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
    )
    if hasattr(torch, name)
)  # fmt: skip
# FRACTAL_NZ stores 16 rows by 32 bytes: divisors of the last two sizes
NZ_TILE = {
    torch.float16: (16, 16),
    torch.bfloat16: (16, 16),
    torch.int8: (16, 32),
    torch.int32: (16, 8),  # eight int4 each, so 64 columns
}


def small_floats(tensors: Iterable[torch.Tensor], *dtypes: torch.dtype | None) -> list[str]:
    """The names of float8 and float4 types among tensors and dtype arguments."""
    seen = {t.dtype for t in tensors} | set(dtypes)
    return sorted(name_of(dtype) for dtype in seen & SMALL_FLOATS)


def is_nz(tensor: torch.Tensor) -> bool:
    return current().format_of(tensor) == FORMAT_FRACTAL_NZ


def is_whole(tensor: torch.Tensor) -> bool:
    """True if a FRACTAL_NZ tensor is all of its storage, padding included: a view of it has no meaning."""
    told = current().is_whole
    if told is not None:
        return told(tensor)
    held, size = tensor.untyped_storage().nbytes(), tensor.element_size()
    rows, columns = NZ_TILE.get(tensor.dtype, (16, 16))
    leading = tensor.numel() // max(tensor.size(-2) * tensor.size(-1), 1) if tensor.dim() > 1 else 1
    padded = (
        leading * _up(tensor.size(-2), rows) * _up(tensor.size(-1), columns) if tensor.dim() > 1 else tensor.numel()
    )
    return tensor.storage_offset() == 0 and held in (0, tensor.numel() * size, padded * size)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def check_nz_weight(call: Call, weight: torch.Tensor) -> None:
    """Checks a FRACTAL_NZ expert weight [E, K, N]."""
    call.require(
        is_whole(weight),
        77,
        f"a view or slice of a FRACTAL_NZ tensor has no meaning: got {shape(weight)} at offset "
        f"{weight.storage_offset()}",
        Layer.PARAMETER,
    )
    tile = NZ_TILE.get(weight.dtype)
    call.require(
        tile is not None, 77, f"FRACTAL_NZ weights are 16-bit or integers, got {name_of(weight.dtype)}", Layer.PARAMETER
    )
    rows, columns = tile
    if weight.stride(1) == 1 and weight.stride(2) != 1:
        rows, columns = columns, rows
    call.require(
        weight.size(-2) % rows == 0 and weight.size(-1) % columns == 0,
        53,
        f"FRACTAL_NZ weights of {name_of(weight.dtype)} need K % {rows} == 0 and N % {columns} == 0, got "
        f"{shape(weight)}",
        Layer.PARAMETER,
    )


def check_cast(tensor: torch.Tensor, acl_format: int, op: str = "npu_format_cast") -> Call:
    """Refuses to cast expert weights [E, K, N] to FRACTAL_NZ if npu_grouped_matmul cannot take them [R77]."""
    call = Call.of(op, "aclnnNpuFormatCast")
    if acl_format != FORMAT_FRACTAL_NZ or tensor.dim() != 3:
        return call
    tile = NZ_TILE.get(tensor.dtype)
    call.require(
        tile is not None,
        77,
        f"npu_grouped_matmul has no FRACTAL_NZ weight of {name_of(tensor.dtype)}: got {shape(tensor)}",
        Layer.PARAMETER,
    )
    call.require(
        tensor.size(-2) % tile[0] == 0 and tensor.size(-1) % tile[1] == 0,
        77,
        f"FRACTAL_NZ expert weights of {name_of(tensor.dtype)} need sizes of whole {tile}, got {shape(tensor)}",
        Layer.PARAMETER,
    )
    return call


@kernel("npu::npu_format_cast(Tensor input, int acl_format, int? customize_dtype=None) -> Tensor")
def format_cast(input: torch.Tensor, acl_format: int, customize_dtype: int | None = None) -> torch.Tensor:
    if current().format_of(input) == acl_format:
        return input
    call = check_cast(input, acl_format)
    result = input.clone(memory_format=torch.contiguous_format)
    call.context.set_format(result, acl_format)
    return result


@kernel("npu::npu_format_cast_.acl_format(Tensor(a!) input, int acl_format, int? customize_dtype=None) -> Tensor(a!)")
def format_cast_(input: torch.Tensor, acl_format: int, customize_dtype: int | None = None) -> torch.Tensor:
    call = check_cast(input, acl_format, "npu_format_cast_")
    call.require(
        acl_format == FORMAT_ND or is_whole(input),
        77,
        f"a view cannot be cast in place to FRACTAL_NZ: got {shape(input)} at offset {input.storage_offset()}",
        Layer.BINDING,
    )
    call.context.set_format(input, acl_format)
    return input


@kernel("npu::_npu_format_cast(Tensor input, int acl_format) -> Tensor")
def inner_format_cast(input: torch.Tensor, acl_format: int) -> torch.Tensor:
    return format_cast(input, acl_format)
