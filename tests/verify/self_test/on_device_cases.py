"""Mistakes in graphs and formats fail their self-tests; a right card passes in tests/doctor/test_emulated.py."""

from __future__ import annotations

import os
from dataclasses import replace
from unittest import mock

import torch
import torch_npu
from ascend_emulator import context

from npu_gptoss.graphs.recorder import Recorded
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test import alone, dense, experts

NPU, BF16 = torch.device("npu"), torch.bfloat16
RANK = Rank(NPU, BF16, 2, hidden=96, inner=64, experts=8, held=(0, 8), heads=8, kv_heads=2)


def wrong(found) -> list[str]:
    return [f"{result.call}: {result.lines[0]}" for result in found if result.wrong]


def case_few_rows_that_lose_columns_are_seen() -> None:
    context.set_default(replace(context.current(), defects=frozenset({"few-rows"})))
    found = wrong(dense.projections(dense.CASES, RANK))
    assert {what.partition(",")[0].rpartition("[")[2] for what in found} == {"1", "16", "63"}


def replayed(change) -> list[str]:
    """The results of the graph's test if `change` (number of the replay, result) stands between replay and caller."""
    right, number = Recorded.replay, iter(range(1000))
    with mock.patch.object(Recorded, "replay", lambda self: change(next(number), self, right)):
        return wrong(alone.graph(RANK))


def case_a_replay_that_is_lost_is_seen() -> None:
    assert "from the definition" in str(replayed(lambda i, self, right: right(self) if i != 20 else self.result))


def case_the_last_replay_gives_the_first_one_s_bits() -> None:
    found = replayed(lambda i, self, right: right(self) * (1.005 if i == alone.REPLAYS - 1 else 1))
    assert "other bits" in str(found)


def case_a_weight_that_stays_in_nd_is_seen() -> None:
    with mock.patch.object(torch_npu, "npu_format_cast", lambda weight, _: weight.clone()):
        assert "has format 2" in str(wrong(alone.linear(RANK)))
        assert "keeps experts' weights" in str(wrong(alone.experts(RANK)))


def case_a_grouped_matmul_that_is_wrong_in_fractal_nz_is_seen() -> None:
    right = torch_npu.npu_grouped_matmul

    def grouped_matmul(**call):
        out = right(**call)
        if torch_npu.get_npu_format(call["weight"][0]) == alone.FRACTAL_NZ:
            out[0][:, :16] = 0
        return out

    with mock.patch.object(torch_npu, "npu_grouped_matmul", grouped_matmul):
        assert wrong(experts.results_of([experts.CASES[0]], replace(RANK, hidden=100, repeats=1))) == [], "ND"
        found = [*alone.experts(RANK)]
        assert found
        assert len(wrong(found)) == len(found)


def case_a_product_by_the_kernel_of_the_other_format_is_seen() -> None:
    right, formats_seen = torch.nn.functional.linear, []

    def linear(x, weight, *rest):
        if x.is_npu:
            formats_seen.append(torch_npu.get_npu_format(weight))
        return right(x, weight, *rest) * (2 if x.is_npu and formats_seen[0] != formats_seen[-1] else 1)

    with mock.patch.object(torch.nn.functional, "linear", linear):
        assert len(wrong(alone.linear(RANK))) == 2


def case_the_card_decides_how_experts_lie() -> None:
    """The real clock and torch-npu's own formats; an emulated card cannot tell which is faster."""
    from npu_gptoss.moe import expert_format

    weight = torch.randn(4, 64, 96).to(torch.bfloat16).to("npu")
    bias = torch.randn(4, 96).to("npu")
    for seconds, wanted in (({2: 1.0, 29: 0.5}, 29), ({2: 1.0, 29: 1.0}, 2)):
        expert_format._faster.clear()
        assert (
            expert_format._seconds(weight[:, :, 0].contiguous(), weight, bias, torch.ones(4, dtype=torch.int64).npu())
            > 0
        )
        timed = expert_format._seconds
        expert_format._seconds = lambda rows, one, *rest: seconds[int(torch_npu.get_npu_format(one))]  # noqa: B023
        first, second = (expert_format.arrange(weight, bias) for _ in range(2))
        expert_format._seconds = timed
        assert [int(torch_npu.get_npu_format(one)) for one in (first, second)] == [wanted, wanted]
        assert torch.equal(first.cpu(), weight.cpu())
    torch.npu.config.allow_internal_format = False
    os.environ[expert_format.VARIABLE] = "nz"
    assert int(torch_npu.get_npu_format(expert_format.arrange(weight, bias))) == 29
