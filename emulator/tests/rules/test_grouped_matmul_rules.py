"""R41 to R56 and R64: the grouped matmuls."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import ContractError, NotEmulatedError

from emulator.tests.contracts import leaves_undefined, rejects

gmm = OPS["npu::npu_grouped_matmul"]
gmm_list = OPS["npu::npu_grouped_matmul.List"]
EXPERTS, INNER, COLUMNS = 3, 32, 16


def case(dtype: torch.dtype = torch.bfloat16, **changes: object) -> dict:
    return {
        "x": [torch.randn(6, INNER).to(dtype)],
        "weight": [torch.randn(EXPERTS, INNER, COLUMNS).to(dtype)],
        "bias": [torch.randn(EXPERTS, COLUMNS).to(torch.float16 if dtype == torch.float16 else torch.float32)],
        "group_list": torch.tensor([2, 0, 3]),
        "split_item": 2,
        "group_type": 0,
        "group_list_type": 1,
        **changes,
    }


def weight_only(bits: int, **changes: object) -> dict:
    size = (EXPERTS, INNER, COLUMNS) if bits == 8 else (EXPERTS, INNER, COLUMNS // 8)
    scale = torch.rand(EXPERTS, COLUMNS).bfloat16()
    return case(
        weight=[torch.ones(size, dtype=torch.int8 if bits == 8 else torch.int32)],
        **{"antiquant_scale": [scale], "antiquant_offset": [torch.zeros_like(scale)], **changes},
    )


def per_group(bits: int, groups: int) -> dict:
    scale = torch.ones(EXPERTS, groups, COLUMNS).bfloat16()
    return weight_only(bits, antiquant_scale=[scale], antiquant_offset=[scale])


def scaled(bits: int, *size: int) -> dict:
    scale = torch.ones(size).bfloat16()
    return weight_only(bits, antiquant_scale=[scale], antiquant_offset=[scale])


def nz(tensor: torch.Tensor):
    return use(format_of=lambda t: FORMAT_FRACTAL_NZ if t is tensor else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_calls_are_legal(dtype):
    gmm(**case(dtype))
    gmm(**case(dtype, bias=None, group_list=torch.tensor([2, 2, 6]), group_list_type=0, split_item=3))


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_only_calls_are_legal(bits):
    gmm(**weight_only(bits))


@pytest.mark.parametrize("value", [None, 1, 3])
def test_R41_group_type_is_given(value):
    with rejects(41, str(value)):
        gmm(**case(group_type=value))


def test_R42_split_item():
    with rejects(42, "[4]"):
        gmm(**case(split_item=4))
    with rejects(42, "group_type -1"):
        gmm(**case(group_type=-1))


@pytest.mark.parametrize(
    "changes",
    [
        {"x": [torch.zeros(2, 6, INNER).bfloat16()]},
        {"weight": [torch.zeros(INNER, COLUMNS).bfloat16()]},
        {"x": [torch.zeros(2, INNER, 6).bfloat16()]},
        {"weight": [torch.zeros(EXPERTS, INNER, COLUMNS, 1).bfloat16()]},
        {"x": [torch.zeros(6, INNER + 1).bfloat16()]},
        {"group_list": torch.tensor([6])},
    ],
    ids=["x rank", "weight rank", "K in the middle of x", "a fourth dimension", "K", "groups"],
)
def test_R43_one_x_and_one_weight_per_expert(changes):
    with rejects(43):
        gmm(**case(**changes))


@pytest.mark.parametrize(
    "groups",
    [None, torch.tensor([2, 0, 3], dtype=torch.int32), torch.tensor([[2, 0, 3]]), torch.zeros(1025, dtype=torch.int64)],
    ids=["missing", "int32", "rank", "many"],
)
def test_R44_group_list_is_int64(groups):
    with rejects(44):
        gmm(**case(group_list=groups))


def test_1024_groups_and_128_lists_are_legal():
    groups = torch.empty(1024, dtype=torch.int64, device="meta")
    weight = torch.empty(1024, INNER, COLUMNS, dtype=torch.bfloat16, device="meta")
    with use(execute=False):
        gmm(**case(weight=[weight], group_list=groups, bias=None))
    ones = torch.ones(1, INNER).bfloat16(), torch.ones(INNER, COLUMNS).bfloat16()
    assert len(gmm([ones[0]] * 128, [ones[1]] * 128, group_type=-1)) == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": [torch.ones(INNER, COLUMNS).bfloat16()] * 2},
        {"weight": [torch.ones(INNER, COLUMNS, 1).bfloat16()]},
        {"weight": [torch.ones(INNER + 1, COLUMNS).bfloat16()]},
    ],
    ids=["two weights", "rank", "K"],
)
def test_R43_one_weight_for_each_x_without_groups(changes):
    with rejects(43):
        gmm(**{"x": [torch.ones(6, INNER).bfloat16()], "group_type": -1, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"x": [torch.ones(6, INNER).bfloat16()] * 2},
        {"weight": [torch.ones(INNER, COLUMNS).bfloat16()]},
        {"weight": [torch.ones(1, INNER, COLUMNS).bfloat16()] * 2},
    ],
    ids=["two x", "one weight", "rank"],
)
def test_R43_the_legacy_form_has_a_weight_for_each_group(changes):
    legal = {"x": [torch.ones(6, INNER).bfloat16()], "weight": [torch.ones(INNER, COLUMNS).bfloat16()] * 2}
    gmm_list(**legal, group_list=[2, 6])
    with rejects(43, "one x and one two-dimensional weight per group"):
        gmm_list(**{**legal, **changes}, group_list=[2, 6])


@pytest.mark.parametrize("ends", [[4, 2], [2, 7]], ids=["decreasing", "past the end"])
def test_groups_of_the_legacy_form_are_checked_on_the_host(ends):
    with pytest.raises(ContractError, match="should not decrease and stay within 6 rows"):
        gmm_list([torch.ones(6, INNER).bfloat16()], [torch.ones(INNER, COLUMNS).bfloat16()] * 2, group_list=ends)


@pytest.mark.parametrize("empty", ["x", "weight"])
def test_empty_lists_are_refused(empty):
    with pytest.raises(ContractError, match="neither x nor weight could be empty"):
        gmm(**case(**{empty: []}))


def test_R44_group_list_is_on_the_device():
    groups = torch.tensor([2, 0, 3])
    with use(is_device=lambda t: t is not groups), rejects(44, "on the device"):
        gmm(**case(group_list=groups))


@pytest.mark.parametrize("kind", [2, 3])
def test_R45_group_list_type(kind):
    with rejects(45, str(kind)):
        gmm(**case(group_list_type=kind, group_list=torch.zeros(3, 2, dtype=torch.int64)))


@pytest.mark.parametrize(
    ("values", "kind"),
    [([2, 1, 6], 0), ([2, -1, 3], 1), ([2, 0, 5], 1), ([2, 3, 7], 0)],
    ids=["shrinking", "negative", "too many", "past the end"],
)
def test_R46_group_values(values, kind):
    broken = case(group_list=torch.tensor(values), group_list_type=kind)
    with rejects(46, str(values)):
        gmm(**broken)
    with use(strict=False), leaves_undefined(46):
        assert gmm(**broken)[0].isnan().all()


@pytest.mark.parametrize(
    ("dtype", "bias"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_R47_bias_dtype(dtype, bias):
    with rejects(47, "float"):
        gmm(**case(dtype, bias=[torch.zeros(EXPERTS, COLUMNS, dtype=bias)]))
    with rejects(47, "int32"):
        gmm(
            **case(
                x=[torch.zeros(6, INNER, dtype=torch.int8)],
                weight=[torch.zeros(EXPERTS, INNER, COLUMNS).to(torch.int8)],
            )
        )


@pytest.mark.parametrize("size", [(COLUMNS,), (EXPERTS, 1, COLUMNS), (EXPERTS, COLUMNS + 1)])
def test_R48_bias_shape(size):
    with rejects(48, "[3, 16]"):
        gmm(**case(bias=[torch.zeros(size)]))


def test_R48_no_bias_when_k_is_split():
    with rejects(48, "group_type 2"):
        gmm(**case(group_type=2))


def test_R49_one_dtype():
    with rejects(49, "bfloat16", "float16"):
        gmm(**case(weight=[torch.zeros(EXPERTS, INNER, COLUMNS, dtype=torch.float16)]))
    with rejects(49):
        gmm(**case(x=[torch.zeros(3, INNER), torch.zeros(3, INNER).bfloat16()]))


def int8(**changes: object) -> dict:
    eight = {"x": [torch.zeros(6, INNER, dtype=torch.int8)], "bias": None}
    return case(**{**eight, "weight": [torch.zeros(EXPERTS, INNER, COLUMNS, dtype=torch.int8)], **changes})


def test_R50_no_activation_in_float():
    with rejects(50, "act_type"):
        gmm(**case(act_type=1))
    with rejects(50, "act_type"):
        gmm(**int8(act_type=1))


def test_int8_is_legal_and_not_emulated():
    """Also with an activation, which per-token scales allow, and with four-bit weights."""
    packed = torch.zeros(EXPERTS, INNER, COLUMNS // 8, dtype=torch.int32)
    for changes in ({}, {"act_type": 1, "per_token_scale": [torch.ones(6)]}, {"weight": [packed]}):
        with pytest.raises(NotEmulatedError, match="int8 x int"):
            gmm(**int8(**changes))


def test_R51_sizes():
    wide = torch.empty(1, 4, 65536, dtype=torch.bfloat16, device="meta")
    narrow = torch.empty(1, 4, dtype=torch.bfloat16, device="meta")
    groups = torch.empty(1, dtype=torch.int64, device="meta")
    with use(execute=False):
        with rejects(51, "65535"):
            gmm(**case(x=[narrow], weight=[wide], group_list=groups, bias=None))
        gmm(
            **case(x=[narrow], weight=[wide.transpose(1, 2).contiguous().transpose(1, 2)], group_list=groups, bias=None)
        )
        gmm(**case(x=[narrow], weight=[wide[..., :65535]], group_list=groups, bias=None))
    with rejects(51, "128"):
        gmm(**case(x=[torch.zeros(1, INNER).bfloat16()] * 129))


WRONG_SCALES = {
    "no offset": lambda: weight_only(8, antiquant_offset=None),
    "scale dtype": lambda: weight_only(
        8, **dict.fromkeys(("antiquant_scale", "antiquant_offset"), (torch.ones(EXPERTS, COLUMNS),))
    ),
    "no scale": lambda: weight_only(8, antiquant_scale=None),
    "offset shape": lambda: weight_only(8, antiquant_offset=[torch.zeros(EXPERTS, 1).bfloat16()]),
    "int8 per group": lambda: per_group(8, 2),
    "ragged int4 groups": lambda: per_group(4, 3),
    "columns": lambda: scaled(4, EXPERTS, 2, COLUMNS + 8),
    "no group": lambda: scaled(4, EXPERTS, 0, COLUMNS),
    "one dimension": lambda: scaled(4, EXPERTS),
}


@pytest.mark.parametrize("make", WRONG_SCALES.values(), ids=WRONG_SCALES)
def test_R52_weight_only_scales(make):
    with rejects(52):
        gmm(**make())


def test_R52_a_transposed_int4_weight_has_even_groups():
    """Otherwise two rows of K share a byte. Not transposed, a group of three is legal."""
    packed = torch.ones(EXPERTS, 2, 6, dtype=torch.int32)
    scale = torch.ones(EXPERTS, 2, 16).bfloat16()
    operands = {"antiquant_scale": [scale], "antiquant_offset": [scale], "bias": None}
    plain = case(x=[torch.ones(6, 6).bfloat16()], weight=[packed.transpose(1, 2).contiguous()], **operands)
    gmm(**plain)
    with rejects(52, "even group"):
        gmm(**{**plain, "weight": [packed.transpose(1, 2)]})
    even = torch.ones(EXPERTS, 1, 16).bfloat16()
    gmm(**{**plain, "weight": [packed.transpose(1, 2)], "antiquant_scale": [even], "antiquant_offset": [even]})


def test_R52_weight_only_is_nd():
    broken = weight_only(8)
    with nz(broken["weight"][0]), rejects(52, "FRACTAL_NZ"):
        gmm(**broken)


@pytest.mark.parametrize("size", [(EXPERTS, INNER + 8, COLUMNS), (EXPERTS, INNER, COLUMNS + 8)])
def test_R53_nz_weights_are_aligned(size):
    weight = torch.zeros(size).bfloat16()
    broken = case(x=[torch.zeros(6, size[1]).bfloat16()], weight=[weight], bias=None)
    with nz(weight), rejects(53, "% 16"):
        gmm(**broken)
    aligned = case()
    with nz(aligned["weight"][0]):
        gmm(**aligned)


def test_R54_no_small_floats():
    with rejects(54, "float8_e4m3fn"):
        gmm(**case(weight=[torch.zeros(EXPERTS, INNER, COLUMNS).to(torch.float8_e4m3fn)]))
    with rejects(54, "float8_e5m2"):
        gmm(**case(output_dtype=torch.float8_e5m2))
    with rejects(54, "x_dtype"):
        gmm(**case(), x_dtype=1)


def test_R55_groups_are_not_read_while_capturing():
    cumulative = {"group_list": torch.tensor([2, 2, 5]), "group_list_type": 0}
    with use(capturing=True), rejects(55, "107027"):
        gmm(**case(**cumulative, split_item=0))
    with use(findings=[]) as context:
        out = gmm(**case(**cumulative, split_item=0))
    assert [len(o) for o in out] == [2, 0, 3]
    assert [f.rule for f in context.findings] == [55]
    weights, groups = list(case()["weight"][0]), [torch.tensor(2), torch.tensor(2), torch.tensor(5)]
    with use(capturing=True), rejects(55, "device tensors"):
        gmm_list(case()["x"], weights, group_list=groups, split_item=2)
    with use(findings=[]) as context:
        gmm_list(case()["x"], weights, group_list=groups, split_item=2)
    assert [f.rule for f in context.findings] == [55]


def test_R56_x_is_not_transposed():
    with rejects(56, "strides"):
        gmm(**case(x=[torch.zeros(INNER, 6).bfloat16().T]))


def test_one_row_or_one_column_is_not_transposed():
    groups = {"group_list": torch.tensor([1, 0, 0]), "bias": None}
    gmm(**case(x=[torch.zeros(INNER, 6).bfloat16().T[:1]], **groups))
    thin = torch.zeros(6, 2).bfloat16()[:, :1]
    gmm(**case(x=[thin.as_strided((6, 1), (2, 5))], weight=[torch.zeros(EXPERTS, 1, COLUMNS).bfloat16()], **groups))


@pytest.mark.parametrize("name", ["npu_grouped_matmul_finalize_routing", "npu_grouped_matmul_swiglu_quant"])
def test_R64_fused_matmuls_are_for_integers(name):
    def run(dtype=torch.int8, columns=COLUMNS, **extra):
        weight = torch.zeros(EXPERTS, INNER, columns, dtype=extra.get("weight", torch.int8))
        operands = [torch.zeros(6, INNER).to(dtype), weight, torch.tensor([2, 2, 5])]
        if name.endswith("swiglu_quant"):
            operands += [torch.ones(EXPERTS, columns), torch.ones(6)]
        with use(format_of=lambda t: 29 if t is weight and "nd" not in extra else 2):
            OPS[f"npu::{name}"](*operands, **({"bias": extra["bias"]} if "bias" in extra else {}))

    with rejects(64, "bfloat16"):
        run(torch.bfloat16)
    with rejects(64, "bias"):
        run(bias=torch.zeros(EXPERTS, COLUMNS))
    with rejects(64, "10240"):
        run(columns=10272)
    with rejects(64, "FRACTAL_NZ"):
        run(nd=True)
    for legal in ({}, {"columns": 10240}, {"weight": torch.int32, "columns": COLUMNS // 8, "nd": True}):
        with pytest.raises(NotEmulatedError):
            run(**legal)
