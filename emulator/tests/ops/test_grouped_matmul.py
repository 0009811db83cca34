"""The grouped matmul against one product per expert."""

from __future__ import annotations

import pytest
import torch
from ascend_emulator.context import use
from ascend_emulator.ops import OPS

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


def test_shapes_are_known_without_execution():
    x, weight, bias = (t.to("meta") for t in operands())
    groups = torch.empty(EXPERTS, dtype=torch.int64, device="meta")
    with use(execute=False, capturing=True):
        out = gmm([x], [weight], bias=[bias], group_list=groups, split_item=2, group_type=0, group_list_type=1)
    assert out[0].shape == (11, COLUMNS)
