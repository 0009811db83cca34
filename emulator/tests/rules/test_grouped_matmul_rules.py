"""R41 to R56: the grouped matmuls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from ascend_emulator.context import FORMAT_FRACTAL_NZ, use
from ascend_emulator.ops import OPS
from ascend_emulator.rules import NotEmulatedError

from emulator.tests.contracts import Broken, broken_calls, check_refusal, leaves_undefined, legal_calls, rejects, under

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


def int8(**changes: object) -> dict:
    eight = {"x": [torch.zeros(6, INNER, dtype=torch.int8)], "bias": None}
    return case(**{**eight, "weight": [torch.zeros(EXPERTS, INNER, COLUMNS, dtype=torch.int8)], **changes})


def call(make: Callable[..., dict] = case, *args: object, **changes: object) -> partial:
    return partial(gmm, **make(*args, **changes))


def ones(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.ones(size, dtype=dtype)


def ungrouped(**changes: object) -> partial:
    return partial(gmm, **{"x": [ones(6, INNER)], "group_type": -1, **changes})


def legacy(**changes: object) -> partial:
    one_each = {"x": [ones(6, INNER)], "weight": [ones(INNER, COLUMNS)] * 2, "group_list": [2, 6]}
    return partial(gmm_list, **one_each | changes)


def nz(arguments: dict) -> Callable[[], None]:
    """The call with its weight in FRACTAL_NZ."""
    weight = arguments["weight"][0]
    return under(partial(gmm, **arguments), format_of=lambda t: FORMAT_FRACTAL_NZ if t is weight else 2)


def unaligned(inner: int, columns: int) -> dict:
    return case(x=[ones(6, inner)], weight=[ones(EXPERTS, inner, columns)], bias=None)


def on_the_host(groups: torch.Tensor) -> Callable[[], None]:
    return under(call(group_list=groups), is_device=lambda t: t is not groups)


WIDE, NARROW = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((1, 4, 65536), (1, 4)))
ONE_GROUP = {"x": [NARROW], "bias": None, "group_list": torch.empty(1, dtype=torch.int64, device="meta")}

BROKEN: Broken = {
    41: {f"type {value}": (call(group_type=value), str(value)) for value in (None, 1, 3)},
    42: {"split_item": (call(split_item=4), "[4]"), "without groups": (call(group_type=-1), "group_type -1")},
    43: {
        "x rank": (call(x=[ones(2, 6, INNER)]),),
        "weight rank": (call(weight=[ones(INNER, COLUMNS)]),),
        "K in the middle of x": (call(x=[ones(2, INNER, 6)]),),
        "a fourth dimension": (call(weight=[ones(EXPERTS, INNER, COLUMNS, 1)]),),
        "K": (call(x=[ones(6, INNER + 1)]),),
        "groups": (call(group_list=torch.tensor([6])),),
        "without groups, two weights": (ungrouped(weight=[ones(INNER, COLUMNS)] * 2),),
        "without groups, rank": (ungrouped(weight=[ones(INNER, COLUMNS, 1)]),),
        "without groups, K": (ungrouped(weight=[ones(INNER + 1, COLUMNS)]),),
        **{
            f"legacy form, {what}": (legacy(**changes), "one x and one two-dimensional weight per group")
            for what, changes in {
                "two x": {"x": [ones(6, INNER)] * 2},
                "one weight": {"weight": [ones(INNER, COLUMNS)]},
                "rank": {"weight": [ones(1, INNER, COLUMNS)] * 2},
            }.items()
        },
    },
    44: {
        "missing": (call(group_list=None),),
        "int32": (call(group_list=torch.tensor([2, 0, 3], dtype=torch.int32)),),
        "rank": (call(group_list=torch.tensor([[2, 0, 3]])),),
        "many": (call(group_list=torch.zeros(1025, dtype=torch.int64)),),
        "on the host": (on_the_host(torch.tensor([2, 0, 3])), "on the device"),
    },
    45: {
        f"type {kind}": (call(group_list_type=kind, group_list=torch.zeros(3, 2, dtype=torch.int64)), str(kind))
        for kind in (2, 3)
    },
    47: {
        **{
            f"{bias} of {dtype}": (call(case, dtype, bias=[torch.zeros(EXPERTS, COLUMNS, dtype=bias)]), "float")
            for dtype, bias in (
                (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32), (torch.float32, torch.bfloat16)
            )
        },
    },
    48: {
        **{
            f"{list(size)}": (call(bias=[torch.zeros(size)]), "[3, 16]")
            for size in ((COLUMNS,), (EXPERTS, 1, COLUMNS), (EXPERTS, COLUMNS + 1))
        },
        "K is split": (call(group_type=2), "group_type 2"),
    },
    49: {
        "weight": (call(weight=[ones(EXPERTS, INNER, COLUMNS, dtype=torch.float16)]), "bfloat16", "float16"),
        "two x": (call(x=[torch.zeros(3, INNER), ones(3, INNER)]),),
    },
    50: {"float": (call(act_type=1), "act_type"), "int8": (call(int8, act_type=1), "act_type")},
    51: {
        "65536": (under(call(weight=[WIDE], **ONE_GROUP), execute=False), "65535"),
        "129 lists": (call(x=[ones(1, INNER)] * 129), "128"),
    },
    53: {
        f"{size}": (nz(unaligned(*size)), "% 16") for size in ((INNER + 8, COLUMNS), (INNER, COLUMNS + 8))
    },
    54: {
        "weight": (call(weight=[torch.zeros(EXPERTS, INNER, COLUMNS).to(torch.float8_e4m3fn)]), "float8_e4m3fn"),
        "output": (call(output_dtype=torch.float8_e5m2), "float8_e5m2"),
        "x": (partial(gmm, **case(), x_dtype=1), "x_dtype"),
    },
    56: {"x": (call(x=[ones(INNER, 6).T]), "strides")},
    0: {
        **{
            f"legacy groups {ends}": (legacy(group_list=ends), "should not decrease and stay within 6 rows")
            for ends in ([4, 2], [2, 7])
        },
        **{f"no {empty}": (call(**{empty: []}), "neither x nor weight could be empty") for empty in ("x", "weight")},
    },
}  # fmt: skip


@broken_calls(BROKEN)
def test_broken_call_is_refused_with_its_rule(rule, run, words):
    check_refusal(rule, run, words)


MANY = {"weight": [torch.empty(1024, INNER, COLUMNS, dtype=torch.bfloat16, device="meta")], "bias": None}
FIRST_ROW = {"group_list": torch.tensor([1, 0, 0]), "bias": None}
LEGAL = {
    **{
        f"{dtype}{', cumulative' * bool(how)}": call(case, dtype, **how)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for how in ({}, {"bias": None, "group_list": torch.tensor([2, 2, 6]), "group_list_type": 0, "split_item": 3})
    },
    "1024 groups": under(
        call(**MANY, group_list=torch.empty(1024, dtype=torch.int64, device="meta")), execute=False
    ),
    "128 lists": partial(gmm, [ones(1, INNER)] * 128, [ones(INNER, COLUMNS)] * 128, group_type=-1),
    "legacy form": legacy(),
    "65535": under(call(weight=[WIDE[..., :65535]], **ONE_GROUP), execute=False),
    "65536 of another axis": under(
        call(weight=[WIDE.transpose(1, 2).contiguous().transpose(1, 2)], **ONE_GROUP), execute=False
    ),
    "aligned in NZ": nz(case()),
    "one row": call(x=[ones(INNER, 6).T[:1]], **FIRST_ROW),
    "one column": call(
        x=[ones(6, 2)[:, :1].as_strided((6, 1), (2, 5))], weight=[ones(EXPERTS, 1, COLUMNS)], **FIRST_ROW
    ),
}  # fmt: skip


@legal_calls(LEGAL)
def test_legal_call_is_taken(run):
    run()


def test_int8_is_legal_and_not_emulated():
    """Also with an activation, which per-token scales allow, and with four-bit weights."""
    packed = torch.zeros(EXPERTS, INNER, COLUMNS // 8, dtype=torch.int32)
    for changes in ({}, {"act_type": 1, "per_token_scale": [torch.ones(6)]}, {"weight": [packed]}):
        with pytest.raises(NotEmulatedError, match="int8 x int"):
            gmm(**int8(**changes))


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
