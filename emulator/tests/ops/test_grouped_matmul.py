"""The grouped matmul against one product per expert."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import use
from ascend_emulator.ops import OPS
from ascend_emulator.ops import grouped_matmul_antiquant as antiquant
from ascend_emulator.ops.formats import pack_int4, unpack_int4
from ascend_emulator.ops.table import Arguments

from tests.tolerances import assert_close

gmm = OPS["npu::npu_grouped_matmul"]
gmm_list = OPS["npu::npu_grouped_matmul.List"]

EXPERTS, INNER, COLUMNS = 4, 64, 32
COUNTS = [3, 0, 4, 1]


def operands(dtype: torch.dtype = torch.bfloat16, rows: int = 11) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, INNER, generator=generator).to(dtype)
    weight = torch.randn(EXPERTS, INNER, COLUMNS, generator=generator).to(dtype)
    return x, weight, torch.randn(EXPERTS, COLUMNS, generator=generator)


def expected(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(COUNTS))
    out = torch.bmm(x[: len(expert), None].double(), weight.double()[expert])[:, 0]
    return (out if bias is None else out + bias.double()[expert]).float()


@pytest.mark.parametrize(("groups", "kind"), [([3, 0, 4, 1], 1), ([3, 3, 7, 8], 0)], ids=["counts", "cumulative"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_meet_their_experts_weights(groups, kind, with_bias):
    x, weight, bias = operands()
    out = gmm(
        [x], [weight], bias=[bias] if with_bias else None, group_list=torch.tensor(groups), split_item=2, group_type=0,
        group_list_type=kind,
    )[0]  # fmt: skip
    assert out.dtype == torch.bfloat16
    assert_close(out[:8], expected(x, weight, bias if with_bias else None))
    assert out[8:].isnan().all(), "rows beyond the groups are not written"


def test_a_transposed_view_of_the_weight_is_the_same():
    x, weight, bias = operands()
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    arguments = {
        "bias": [bias],
        "group_list": torch.tensor(COUNTS),
        "split_item": 3,
        "group_type": 0,
        "group_list_type": 1,
    }
    assert torch.equal(gmm([x[:8]], [turned], **arguments)[0], gmm([x[:8]], [weight], **arguments)[0])


def test_the_bias_is_added_before_rounding():
    x, weight = torch.ones(1, 2).bfloat16(), torch.tensor([[[256.0], [1.0]]]).bfloat16()
    out = gmm(
        [x], [weight], bias=[torch.full((1, 1), 0.5)], group_list=torch.tensor([1]), split_item=2, group_type=0,
        group_list_type=1,
    )[0]  # fmt: skip
    assert float(out) == 258.0  # 257.5, rounded once; 257 would first round to 256 and stay there


def test_the_list_overload_and_group_type_minus_one_agree():
    x, weight, _ = operands(rows=8)
    want = expected(x, weight, None)
    parts = gmm_list([x], list(weight), group_list=[3, 3, 7, 8])
    assert [len(p) for p in parts] == COUNTS
    assert_close(torch.cat(parts), want)
    assert_close(gmm_list([x], list(weight), group_list=[3, 3, 7, 8], split_item=3)[0], want)
    assert_close(torch.cat(gmm(list(x.split(COUNTS)), list(weight), group_type=-1)), want)


def test_int8_weights_are_dequantised_per_channel():
    x, _, bias = operands(rows=8)
    weight = torch.randint(-128, 128, (EXPERTS, INNER, COLUMNS), dtype=torch.int8)
    scale = (torch.rand(EXPERTS, COLUMNS) / 64).bfloat16()
    offset = torch.randint(-4, 4, (EXPERTS, COLUMNS)).bfloat16()
    out = gmm([x], [weight], bias=[bias], antiquant_scale=[scale], antiquant_offset=[offset], split_item=2,
    group_type=0,
              group_list=torch.tensor(COUNTS), group_list_type=1)[0]  # fmt: skip
    plain = ((weight.float() + offset.float()[:, None]) * scale.float()[:, None]).bfloat16()
    assert_close(out, expected(x, plain, bias))


def test_int4_weights_are_dequantised_per_group():
    x, _, _ = operands(rows=8)
    values = torch.randint(-8, 8, (EXPERTS, INNER, COLUMNS), dtype=torch.int32)
    scale = torch.rand(EXPERTS, 2, COLUMNS).bfloat16()
    out = gmm([x], [pack_int4(values)], antiquant_scale=[scale], antiquant_offset=[torch.zeros_like(scale)],
    split_item=2,
              group_type=0, group_list=torch.tensor(COUNTS), group_list_type=1)[0]  # fmt: skip
    plain = (values.float() * scale.float().repeat_interleave(INNER // 2, 1)).bfloat16()
    assert_close(out, expected(x, plain, None))


def test_int4_packing_is_lossless():
    values = torch.randint(-8, 8, (5, 16), dtype=torch.int32)
    assert torch.equal(unpack_int4(pack_int4(values)), values.to(torch.int8))
    packed = OPS["npu::npu_convert_weight_to_int4pack"](values)
    assert torch.equal(packed, pack_int4(values))
    assert pack_int4(torch.arange(-8, 0, dtype=torch.int32)).item() == -(0x100000000 - 0xFEDCBA98)


def test_weight_quant_batchmatmul_matches_its_formula():
    x = torch.randn(3, 64).bfloat16()
    weight = torch.randint(-128, 128, (64, 16), dtype=torch.int8)
    scale, offset, bias = torch.rand(2, 16).bfloat16() / 64, torch.ones(2, 16).bfloat16(), torch.randn(16)
    got = OPS["npu::npu_weight_quant_batchmatmul"](x, weight, scale, offset, None, None, bias, 32)
    plain = ((weight.float() + 1) * scale.float().repeat_interleave(32, 0)).bfloat16().float()
    assert_close(got, x.float() @ plain + bias)


def test_shapes_are_known_without_execution():
    x, weight, bias = (t.to("meta") for t in operands())
    groups = torch.empty(EXPERTS, dtype=torch.int64, device="meta")
    with use(execute=False, capturing=True):
        out = gmm([x], [weight], bias=[bias], group_list=groups, split_item=2, group_type=0, group_list_type=1)
    assert out[0].shape == (11, COLUMNS)


ALIGNED, WIDE = 128, 1024  # the smallest K and N of the kernel on int8 planes


def planes_case(rows: int = 6, inner: int = ALIGNED, columns: int = WIDE, experts: int = 2) -> dict:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randint(-128, 128, (experts, inner, columns), dtype=torch.int8, generator=generator)
    scale = (torch.rand(experts, columns, generator=generator) / 64).bfloat16()
    offset = torch.randint(-4, 4, (experts, columns), generator=generator).bfloat16()
    return {
        "x": [torch.randn(rows, inner, generator=generator).bfloat16()],
        "weight": [weight],
        "bias": [torch.randn(experts, columns, generator=generator)],
        "antiquant_scale": [scale],
        "antiquant_offset": [offset],
        "group_list": torch.tensor([rows - 2, 2]),
        "group_list_type": 1,
        "group_type": 0,
        "split_item": 2,
    }


def exact(case: dict, rounded: bool) -> torch.Tensor:
    """The product in float64. rounded: with weights as the expanding kernel rounds them."""
    weight, scale, offset = (case[name][0].double() for name in ("weight", "antiquant_scale", "antiquant_offset"))
    plain = (weight + offset[:, None]) * scale[:, None]
    plain = plain.bfloat16().double() if rounded else plain
    expert = torch.repeat_interleave(torch.arange(len(weight)), case["group_list"])
    return torch.bmm(case["x"][0].double()[:, None], plain[expert])[:, 0] + case["bias"][0].double()[expert]


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).norm() / wanted.norm())


def test_aligned_int8_weights_are_not_expanded_and_rows_keep_15_bits():
    case = planes_case()
    case["x"][0][3] = 0  # a row without a largest value
    got = gmm(**case)[0]
    calm = [0, 1, 2, 4, 5]
    assert off(got[calm], exact(case, rounded=False)[calm]) < 2e-3, "rounding of the result alone"
    assert_close(got[3], case["bias"][0][0])
    weights_rounded = exact(case, rounded=True)
    assert off(weights_rounded[calm], exact(case, rounded=False)[calm]) > 5e-4, "the other kernel rounds weights"


def test_on_planes_a_small_value_beside_a_large_one_is_lost():
    case = planes_case()
    case["antiquant_offset"][0].zero_()  # offsets meet the exact sum of a row
    row = case["x"][0][4]
    got = {}
    for beside in (0.0, 0.2, 2.0):  # a step is 3e4 / 127 / 254 = 0.93
        row.zero_()
        row[:2] = torch.tensor([3e4, beside])
        got[beside] = gmm(**case)[0][4]
    assert torch.equal(got[0.2], got[0.0])
    assert not torch.equal(got[2.0], got[0.0])


@pytest.mark.parametrize(
    ("sizes", "planes"),
    [
        ({}, True),
        ({"inner": 192}, False),
        ({"columns": 1088}, False),
        ({"columns": 896}, False),
        ({"inner": 12 * 1024 + 128}, False),
        ({"rows": 128}, True),
        ({"rows": 129}, False),
        ({"inner": 2944, "columns": 5888}, True),
        ({"inner": 2880, "columns": 5760}, False),
    ],
    ids=lambda v: str(v),
)
def test_int8_sizes_that_run_on_planes(sizes, planes):
    case = {"rows": 6, "inner": ALIGNED, "columns": WIDE, "experts": 2, **sizes}
    x = torch.empty(case["rows"], case["inner"], dtype=torch.bfloat16, device="meta")
    weight = torch.empty(case["experts"], case["inner"], case["columns"], dtype=torch.int8, device="meta")
    assert antiquant.runs_on_planes(Arguments(x=[x], weight=[weight], group_type=0)) is planes
    assert not antiquant.runs_on_planes(Arguments(x=[x], weight=[weight.to(torch.int32)], group_type=0))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("rows", "experts", "inner", "columns", "transposed", "expected_bytes"),
    [
        (40, 32, 2880, 5760, False, 2 * 2880 * 5760 * 2),  # 20b, gate and up: two experts in turn, 66 MB
        (40, 32, 2880, 5760, True, 32 * 2880 * 5760 * 2),  # 1.06 GB
        (40, 128, 2880, 5760, True, 128 * 2880 * 5760 * 2),  # 120b: 4.2 GB
        (40, 32, 2880, 720, False, 32 * 2880 * 720 * 2),  # an eighth of the columns: three tiles, cubes idle
        (40, 32, 360, 2880, False, 32 * 360 * 2880 * 2),  # K too short
        (40, 32, 2944, 5888, False, 40 * (20 * 4 + 32 + 2 * (2944 + 4 * 5888))),  # on planes
    ],
)
def test_the_workspace_of_weight_only_experts(rows, experts, inner, columns, transposed, expected_bytes):
    x = torch.empty(rows, inner, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(experts, inner, columns, dtype=torch.int8, device="meta")
    if transposed:
        weight = torch.empty(experts, columns, inner, dtype=torch.int8, device="meta").transpose(1, 2)
    groups = torch.empty(experts, dtype=torch.int64, device="meta")
    assert gmm.workspace([x], [weight], group_list=groups, group_type=0, split_item=2) == 16 * MIB + expected_bytes
    assert gmm.workspace([x], [weight.to(torch.bfloat16)], group_list=groups, group_type=0, split_item=2) == 0
