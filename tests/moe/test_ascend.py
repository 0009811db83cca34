"""The fused experts on the emulated operators: against the definition, and when they are called wrongly.

The operators check the contract of CANN 8.3 in strict mode, so a test that passes also says that none of it is broken.
"""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from npu_gptoss import moe
from npu_gptoss.kernels import KernelError, platform_override
from npu_gptoss.kernels.selection import explain
from npu_gptoss.moe import ascend, prepare_experts, route
from npu_gptoss.moe.activation import swigluoai
from npu_gptoss.verify.moe_cases import local_share
from tests import ascend_ops
from tests.moe.cases import EXPERTS, INTERMEDIATE, TOP_K, check, make_layer
from tests.moe.test_weights import packed
from tests.refused import refused
from tests.tolerances import assert_close

BF16 = torch.bfloat16


@pytest.fixture
def calls():
    with ascend_ops.ascend() as calls:
        yield calls


def fused(layer):
    return layer.run("ascend")


def test_ascend_experts_are_six_operators_by_default(calls):
    make_layer(5, BF16).run()
    assert [name for name, _ in calls] == [
        "npu_moe_gating_top_k_softmax",
        "npu_moe_init_routing_v2",
        "npu_grouped_matmul",
        "npu_swiglu",
        "npu_grouped_matmul",
        "npu_moe_token_unpermute",
    ]


def test_another_kernel_s_ids_of_64_bits_are_not_refused(calls):
    layer = make_layer(5, BF16)
    routing = route(layer.logits, TOP_K, kernel="reference")
    assert routing[1].dtype == torch.int64
    check(lambda at: at.run("ascend", routing=routing), layer)


@pytest.mark.parametrize("says", ["8.3.RC2", "8.3", "", "not known", None])
def test_activation_is_one_operator_only_with_a_kernel_for_it(says):
    """On CANN 8.5 (None). Not with a later torch-npu on CANN 8.3, and where CANN's version is unknown, three launches
    are right everywhere."""
    known = says is None
    with ascend_ops.ascend("8.5" if known else "8.3.rc2", later_wheel=not known, cann_says=says) as calls:
        make_layer(5, BF16).run()
    names = [name for name, _ in calls]
    assert ("npu_clipped_swiglu" in names, "npu_swiglu" in names) == (known, not known)


def test_a_wheel_without_the_activation_is_not_asked_for_it(monkeypatch):
    with ascend_ops.ascend("8.5") as calls:
        monkeypatch.delattr(sys.modules["torch_npu"], "npu_clipped_swiglu")
        make_layer(5, BF16).run()
    assert "npu_swiglu" in [name for name, _ in calls]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_routing_is_one_launch_where_the_wheel_has_the_operator(dtype):
    """Ids and weights are the definition's, bit for bit but for the last rounding; ties go to the first expert."""
    logits = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[7, 90:] = logits[7].max()
    want, chosen = route(logits, TOP_K, kernel="reference")
    with ascend_ops.ascend("9.1") as calls:
        weights, ids = route(logits, TOP_K)
        apart, _ = route(logits, TOP_K, kernel="moe.route.ascend")
    name, options = calls[0]
    assert (name, options["renorm"]) == ("npu_moe_gating_top_k_softmax_v2", 1)
    assert torch.equal(ids.long(), chosen)
    assert weights.dtype == dtype
    assert torch.equal(weights, want.to(dtype))
    assert apart.dtype == torch.float32
    assert_close(apart, want, scale=2)


def test_routing_without_the_operator_says_so():
    call = moe.operations.route_call(BF16)
    with ascend_ops.ascend("8.3.rc1"):
        lines = "\n".join(explain(moe.operations.ROUTE, *call).lines())
    assert "ascend_one_launch (priority 9): no: needs npu_moe_gating_top_k_softmax_v2, which is not installed" in lines
    assert "moe.route.ascend (priority 8): selected" in lines


def test_asking_for_the_name_alone_would_fail_at_the_first_call():
    with ascend_ops.ascend("8.3.rc2", later_wheel=True, cann_says="8.5.0"), pytest.raises(RuntimeError, match="R66"):
        make_layer(5, BF16).run()


def slopes(layer, sizes=(0.05, 0.3, 1.0, 3.0, 8.0)):
    """The least-squares slope of the activation against its definition, for pre-activations of each size."""
    generator = torch.Generator().manual_seed(4)
    experts = prepare_experts(layer.weights, kernel="ascend").weights
    for size in sizes:
        gate_up = (torch.randn(4096, 2 * INTERMEDIATE, generator=generator) * size).to(BF16)
        want = swigluoai(gate_up.float()).double()
        got = ascend.clipped_swiglu(ascend.halves(gate_up), experts).double() / experts.gain
        yield float((got * want).sum() / (want * want).sum())


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5"])
def test_the_activation_is_not_systematically_small_or_large(cann):
    """0.2 % too little in every layer hid in a tolerance of 2 %: constants that are rounded make a slope, not noise."""
    with ascend_ops.ascend(cann):
        assert max(abs(slope - 1) for slope in slopes(make_layer(1, BF16))) < 5e-4


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5"])
def test_the_clamp_is_the_one_of_the_config(cann):
    """The limit of 7 stands in transformers' code; a config may say another."""
    layer = make_layer(20, BF16)
    with ascend_ops.ascend(cann):
        got = layer.run("ascend", swiglu_limit=1.5)
    want = layer.run("reference", swiglu_limit=1.5)
    slack = want.float().abs().max().item() / 64  # three roundings on the way of every value, most of them at the clamp
    assert_close(got, want, atol=slack)
    with pytest.raises(AssertionError):
        assert_close(layer.run("reference"), want, atol=slack)


@pytest.mark.parametrize(("first", "last", "idle"), [(0, 4, False), (2, 5, False), (7, 8, False), (4, 8, True)])
def test_shares_of_expert_parallel_ranks_equal_the_definition(calls, first, last, idle):
    """Rows of foreign experts are never computed: the operators leave NaN in them, in all where no token comes here."""
    layer = make_layer(33, BF16, one_expert=idle)
    share = local_share(layer.weights, first, last)
    check(lambda at: at.run("ascend", share), layer, share)
    (routing,) = (kwargs for name, kwargs in calls if name == "npu_moe_init_routing_v2")
    assert (routing["expert_num"], routing["active_expert_range"]) == (EXPERTS, [first, last])


def test_a_rank_without_experts_has_an_empty_range():
    assert ascend.expert_range(local_share(make_layer(1, BF16).weights, 3, 3)) == (0, 0, EXPERTS)


def test_the_rows_that_stand_for_foreign_ones_are_numbers():
    """They are weighted with zero, but zero times NaN is NaN."""
    rows = torch.full((4, 3), float("nan"))
    rows[0, 1] = float("inf")
    ascend.finite_first_row(rows)
    assert bool((rows[:1] * 0 == 0).all())
    assert bool(rows[1:].isnan().all())
    ascend.finite_first_row(torch.empty(0, 3))


def test_experts_of_a_rank_must_be_a_range(calls):
    share = local_share(make_layer(1, BF16).weights, 2, 4)
    scattered = share.expert_map.roll(3)
    scattered[0] = 1
    gap = torch.tensor([-1, -1, 0, -1, 1, -1, -1, -1])  # in order, but another rank's expert lies between
    for wrong in (scattered, share.expert_map.flip(0), gap):
        with refused("expert_map"):
            prepare_experts(dataclasses.replace(share, expert_map=wrong))


@pytest.mark.parametrize("group_list_type", [0, 1], ids=["cumulative", "counts"])
@pytest.mark.parametrize("counts", [(0, 5, 0, 7, 1, 0, 9, 2), (24, 0, 0, 0, 0, 0, 0, 0), (0, 9, 15)])
def test_packed_experts_give_the_bits_of_expanded_ones(calls, monkeypatch, counts, group_list_type):
    """Also of a rank's share, and where the room has another layer's experts; experts without tokens stay the other
    layer's."""
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_MOE_EXPAND", "reference")  # without Triton-Ascend
    rows, groups = make_layer(24, BF16).hidden_states, torch.tensor(counts)
    asked = groups if group_list_type else groups.cumsum(0)

    def prepared(seed: int) -> tuple[ascend.AscendExperts, ascend.AscendExperts]:
        weights = make_layer(1, BF16, seed).weights
        weights = packed(weights if len(counts) == EXPERTS else local_share(weights, 2, 2 + len(counts)))
        with platform_override("ascend", frozenset({"torch_npu", "triton_ascend"})):
            kept = prepare_experts(weights, kernel="ascend").weights
        return kept, prepare_experts(weights.expand(BF16), kernel="ascend").weights

    kept, expanded = prepared(1)
    other, _ = prepared(2)
    assert other.gate_up_proj is kept.gate_up_proj, "one room for all layers"
    ascend.grouped_mlp(rows, other, torch.tensor([24 // len(counts)] * len(counts)), 1)
    got = ascend.grouped_mlp(rows, kept, asked, group_list_type)
    assert torch.equal(got, ascend.grouped_mlp(rows, expanded, asked, group_list_type))
    theirs = expanded.gate_up_proj != kept.gate_up_proj
    assert theirs.flatten(1).any(1).tolist() == [count == 0 for count in counts]


@pytest.mark.parametrize("group_list_type", [0, 1], ids=["cumulative", "counts"])
def test_group_lists_of_both_types(calls, group_list_type):
    """MC2 hands over cumulative lists, all other dispatchers counts; taking one for the other garbles."""
    layer = make_layer(24, BF16)
    experts = prepare_experts(layer.weights, kernel="ascend").weights
    counts = torch.tensor([0, 5, 0, 7, 1, 0, 9, 2])
    group_list = counts if group_list_type else counts.cumsum(0)
    got = ascend.grouped_mlp(layer.hidden_states, experts, group_list, group_list_type) / experts.gain
    for expert, (start, count) in enumerate(zip((counts.cumsum(0) - counts).tolist(), counts.tolist(), strict=True)):
        rows = layer.hidden_states[start : start + count]
        every = torch.zeros(count, TOP_K)
        every[:, 0] = 1
        one = dataclasses.replace(layer, hidden_states=rows)
        want = one.run("reference", routing=(every, torch.full((count, TOP_K), expert)))
        largest = want.float().abs().max().item() if count else 0
        assert_close(got[start : start + count], want, atol=largest / 128)


def test_float32_is_refused_but_for_diagnosis(calls):
    with pytest.raises(KernelError, match="needs bfloat16 hidden, got float32"):
        make_layer(2).run("ascend")
