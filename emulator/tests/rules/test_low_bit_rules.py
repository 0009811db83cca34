"""R78 to R80: weight-only matmul, int4 packing, and floats of eight bits or fewer."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import NotEmulatedError

from emulator.tests.contracts import Broken, broken_calls, check_refusal, leaves_undefined, of, rejects, under

matmul = OPS["npu::npu_weight_quant_batchmatmul"]
pack = OPS["npu::npu_convert_weight_to_int4pack"]
dynamic_quant = OPS["npu::npu_dynamic_quant"]
BF16, INT8, INT32 = torch.bfloat16, torch.int8, torch.int32
WEIGHT = torch.ones(128, 16, dtype=INT8)


def ones(*size: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def case(**changes: object) -> dict:
    operands = {"x": torch.randn(2, 128).bfloat16(), "weight": WEIGHT, "antiquant_scale": ones(4, 16)}
    return {**operands, "antiquant_group_size": 32, **changes}


def large(inner: int, **changes: object) -> dict:
    x, weight, scale = ((1, inner), BF16), ((inner, 8), INT8), ((8,), BF16)
    sizes = {"x": x, "weight": weight, "antiquant_scale": scale}
    return {name: torch.empty(size, dtype=dtype, device="meta") for name, (size, dtype) in sizes.items()}


def of_groups(size: int, groups: int, **changes: object) -> dict:
    return case(antiquant_group_size=size, antiquant_scale=ones(groups, 16), **changes)


def int4_in_nz(inner: int, columns: int, group: int) -> dict:
    scale = ones(-(-inner // group), columns)
    return {"x": ones(2, inner), "weight": torch.zeros(inner, columns // 8, dtype=INT32),
            "antiquant_scale": scale, "antiquant_group_size": group}  # fmt: skip


# of the operands only a weight is an integer
IN_NZ = {"format_of": lambda t: FORMAT_FRACTAL_NZ if not t.is_floating_point() else 2}
BROKEN: Broken = {
    78: {
        **{f"group {size}": (of(matmul, case, antiquant_group_size=size),) for size in (16, 48, 128)},
        **{
            f"group {size} with its scales": (of(matmul, of_groups, size=size, groups=-(-128 // size)),)
            for size in (16, 48, 128)
        },
        "scales": (of(matmul, case, antiquant_scale=ones(3, 16)),),
        "offset": (of(matmul, case, antiquant_offset=ones(1, 16)),),
        "rank": (of(matmul, case, x=ones(1, 2, 128)),),
        "weight rank": (of(matmul, case, weight=WEIGHT[..., None]),),
        "empty": (of(matmul, case, x=ones(0, 128)),),
        "no columns": (of(matmul, case, weight=WEIGHT[:, :0], antiquant_scale=ones(4, 0)),),
        "K": (of(matmul, case, weight=ones(129, 16, dtype=INT8)),),
        "bias": (of(matmul, case, bias=ones(16)),),
        "quantised": (of(matmul, case, antiquant_scale=ones(4, 16, dtype=torch.int64), quant_scale=torch.ones(1)),),
        "65536": (under(of(matmul, large, inner=65536), execute=False), "65535"),
        "int4 in NZ": (
            under(of(matmul, case, weight=torch.zeros(128, 8, dtype=INT32), antiquant_scale=ones(4, 64)), **IN_NZ),
            "64 or 128",
        ),
        "a group and a half": (
            under(of(matmul, int4_in_nz, inner=160, columns=64, group=64), **IN_NZ), "FRACTAL_NZ int4",
        ),
        "N % 64": (under(of(matmul, int4_in_nz, inner=128, columns=32, group=64), **IN_NZ), "FRACTAL_NZ int4"),
        "a quantised output in NZ": (under(of(matmul, case, quant_scale=torch.ones(1)), **IN_NZ), "FRACTAL_NZ"),
    },
    79: {
        "not eights": (lambda: pack(torch.zeros(4, 12, dtype=INT32)),),
        "int8": (lambda: pack(torch.zeros(4, 8, dtype=INT8)),),
        "strided": (lambda: pack(torch.zeros(8, 4, dtype=INT32).T),),
        "rank": (lambda: pack(torch.zeros(2, 4, 8, dtype=INT32)),),
    },
    80: {
        **{
            name: (lambda name=name: OPS[f"npu::{name}"](ones(2, 32)), "MX")
            for name in ("npu_dynamic_mx_quant", "npu_dynamic_block_mx_quant")
        },
        "float8_e4m3fn": (lambda: dynamic_quant(ones(2, 32), dst_type=torch.float8_e4m3fn), "float8_e4m3fn"),
        "float8_e5m2": (
            lambda: OPS["npu::npu_quantize"](torch.zeros(2, 32), torch.ones(1), None, torch.float8_e5m2),
            "float8_e5m2",
        ),
    },
}  # fmt: skip


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)


def test_scales_of_channels_and_the_largest_sizes_are_legal():
    matmul(**case(), bias=torch.zeros(16))
    for scale in (ones(16), ones(1, 16)):
        matmul(**case(antiquant_scale=scale, antiquant_group_size=0))
    matmul(**of_groups(96, 2))
    matmul(**of_groups(128, 2, x=ones(2, 129), weight=ones(129, 16, dtype=INT8)))
    with use(execute=False):
        matmul(**large(65535))
    with use(**IN_NZ):
        matmul(**int4_in_nz(192, 64, 64))
        matmul(**int4_in_nz(256, 64, 128))
    with pytest.raises(NotEmulatedError):
        matmul(**case(), quant_scale=torch.ones(1))


def test_R79_int4_values():
    wide = torch.full((1, 8), 8, dtype=torch.int32)
    with rejects(79, "8 to 8"):
        pack(wide)
    with use(strict=False), leaves_undefined(79):
        pack(wide)
