"""R78 to R80: weight-only matmul, int4 packing, and floats of eight bits or fewer."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import NotEmulatedError

from emulator.tests.contracts import leaves_undefined, rejects

matmul = OPS["npu::npu_weight_quant_batchmatmul"]
pack = OPS["npu::npu_convert_weight_to_int4pack"]
dynamic_quant = OPS["npu::npu_dynamic_quant"]


def case(**changes: object) -> dict:
    return {
        "x": torch.randn(2, 128).bfloat16(),
        "weight": torch.ones(128, 16, dtype=torch.int8),
        "antiquant_scale": torch.ones(4, 16).bfloat16(),
        "antiquant_group_size": 32,
        **changes,
    }


WRONG_OPERANDS = {
    "small group": {"antiquant_group_size": 16},
    "group K": {"antiquant_group_size": 128},
    "group 48": {"antiquant_group_size": 48},
    "scales": {"antiquant_scale": torch.ones(3, 16).bfloat16()},
    "offset": {"antiquant_offset": torch.ones(1, 16).bfloat16()},
    "rank": {"x": torch.zeros(1, 2, 128).bfloat16()},
    "weight rank": {"weight": torch.ones(128, 16, 1, dtype=torch.int8)},
    "empty": {"x": torch.zeros(0, 128).bfloat16()},
    "no columns": {"weight": torch.ones(128, 0, dtype=torch.int8), "antiquant_scale": torch.ones(4, 0).bfloat16()},
    "K": {"weight": torch.ones(129, 16, dtype=torch.int8)},
    "small group with its scales": {"antiquant_group_size": 16, "antiquant_scale": torch.ones(8, 16).bfloat16()},
    "group K with its scales": {"antiquant_group_size": 128, "antiquant_scale": torch.ones(1, 16).bfloat16()},
    "group 48 with its scales": {"antiquant_group_size": 48, "antiquant_scale": torch.ones(3, 16).bfloat16()},
    "bias": {"bias": torch.zeros(16).bfloat16()},
    "quantised": {"antiquant_scale": torch.ones(4, 16, dtype=torch.int64), "quant_scale": torch.ones(1)},
}


@pytest.mark.parametrize("changes", WRONG_OPERANDS.values(), ids=WRONG_OPERANDS)
def test_R78_weight_quant_batchmatmul(changes):
    matmul(**case(), bias=torch.zeros(16))
    with rejects(78):
        matmul(**case(**changes))


def test_R78_weight_quant_batchmatmul_in_large_and_in_nz():
    with use(execute=False), rejects(78, "65535"):
        matmul(
            torch.empty(1, 65536, dtype=torch.bfloat16, device="meta"),
            torch.empty(65536, 8, dtype=torch.int8, device="meta"),
            torch.empty(8, dtype=torch.bfloat16, device="meta"),
        )
    weight = torch.zeros(128, 8, dtype=torch.int32)
    with use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is weight else 2), rejects(78, "64 or 128"):
        matmul(**case(weight=weight, antiquant_scale=torch.ones(4, 64).bfloat16()))


@pytest.mark.parametrize(
    ("inner", "columns", "group"), [(160, 64, 64), (128, 32, 64)], ids=["a group and a half", "N % 64"]
)
def test_R78_int4_in_nz_is_whole_groups_and_tiles(inner, columns, group):
    def call(inner: int, columns: int, group: int) -> None:
        weight = torch.zeros(inner, columns // 8, dtype=torch.int32)
        scale = torch.ones(-(-inner // group), columns).bfloat16()
        with use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is weight else 2):
            matmul(torch.zeros(2, inner).bfloat16(), weight, scale, antiquant_group_size=group)

    call(192, 64, 64)
    call(256, 64, 128)
    with rejects(78, "FRACTAL_NZ int4"):
        call(inner, columns, group)


def test_R78_a_quantised_output_wants_nd():
    weight = torch.ones(128, 16, dtype=torch.int8)
    with use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is weight else 2), rejects(78, "FRACTAL_NZ"):
        matmul(**case(weight=weight), quant_scale=torch.ones(1))
    with pytest.raises(NotEmulatedError):
        matmul(**case(), quant_scale=torch.ones(1))


def test_scales_of_channels_and_the_largest_sizes_are_legal():
    for scale in (torch.ones(16), torch.ones(1, 16)):
        matmul(**case(antiquant_scale=scale.bfloat16(), antiquant_group_size=0))
    matmul(**case(antiquant_scale=torch.ones(2, 16).bfloat16(), antiquant_group_size=96))
    last = {"x": torch.zeros(2, 129).bfloat16(), "weight": torch.ones(129, 16, dtype=torch.int8)}
    matmul(**case(**last, antiquant_scale=torch.ones(2, 16).bfloat16(), antiquant_group_size=128))
    with use(execute=False):
        matmul(
            torch.empty(1, 65535, dtype=torch.bfloat16, device="meta"),
            torch.empty(65535, 8, dtype=torch.int8, device="meta"),
            torch.empty(8, dtype=torch.bfloat16, device="meta"),
        )


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(4, 12, dtype=torch.int32),
        torch.zeros(4, 8, dtype=torch.int8),
        torch.zeros(8, 4, dtype=torch.int32).T,
        torch.zeros(2, 4, 8, dtype=torch.int32),
    ],
    ids=["not eights", "int8", "strided", "rank"],
)
def test_R79_int4pack(weight):
    with rejects(79):
        pack(weight)


def test_R79_int4_values():
    wide = torch.full((1, 8), 8, dtype=torch.int32)
    with rejects(79, "8 to 8"):
        pack(wide)
    with use(strict=False), leaves_undefined(79):
        pack(wide)


def test_R80_no_small_floats():
    for name in ("npu_dynamic_mx_quant", "npu_dynamic_block_mx_quant"):
        with rejects(80, "MX"):
            OPS[f"npu::{name}"](torch.zeros(2, 32).bfloat16())
    with rejects(80, "float8_e4m3fn"):
        dynamic_quant(torch.zeros(2, 32).bfloat16(), dst_type=torch.float8_e4m3fn)
    with rejects(80, "float8_e5m2"):
        OPS["npu::npu_quantize"](torch.zeros(2, 32), torch.ones(1), None, torch.float8_e5m2)
