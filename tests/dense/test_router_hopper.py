"""The Gluon router on a Hopper GPU: against the definition, its order of equals and of signs, and its mistakes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_gptoss.dense import reference
from tests.dense import test_kernels as cpu
from tests.dense.cases import Case, make_case
from tests.dense.test_hopper import FULL, mutated
from tests.triton import ON_HOPPER

pytest.importorskip("triton", reason="needs triton")


def case_of(rows: int, experts: int = 32) -> Case:
    return make_case(rows, min(rows, 24), sizes=replace(FULL, experts=experts), device="cuda")


def run(case: Case, delta: bool = True, **changes: object) -> cpu.Outputs:
    return cpu.run_router(cpu.triton_kernel("router.gluon"), case, delta, **changes)


def compare(got: cpu.Outputs, case: Case, delta: bool = True) -> None:
    """Logits may be rounded the other way, and then others be chosen: within that, the largest in their order."""
    residual, normed, weights, ids = got
    assert torch.equal(residual, case.residual + case.delta if delta else case.residual), "differs: the residual"
    exact = reference.add_norm(residual, None, case.norm, case.eps)[1]
    error = (normed.float() - exact.float()).norm() / exact.float().norm()
    assert error < 5e-3, f"the norm differs by {error:.1e}"  # bf16 rounds by 1.7e-3
    assert ids.min() >= 0
    assert ids.max() < case.sizes.experts, "no expert"
    assert (ids.long().sort(1).values.diff(dim=1) > 0).all(), "an expert twice"
    logits = normed.float() @ case.router_weight.float().T + case.router_bias.float()
    chosen = logits.gather(1, ids.long())
    rounding = logits.abs().amax(1, keepdim=True) * 2**-7
    assert (chosen[:, :-1] >= chosen[:, 1:] - rounding).all(), "not in order"
    left = logits.scatter(1, ids.long(), float("-inf")).amax(1, keepdim=True)
    assert (chosen[:, -1:] >= left - rounding).all(), "a larger one left out"
    error = (weights - torch.softmax(chosen.to(torch.bfloat16).float(), -1)).abs().max()
    assert error < 0.03, f"weights differ by {error:.1e}"  # e to the power of a rounding of a logit of 4


@pytest.mark.parametrize(("rows", "experts"), [(1, 32), (8, 64), (33, 128), (101, 32), (128, 32), (256, 128)])
class TestOnHopper:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize("delta", [True, False])
    def test_the_largest_are_chosen_again_and_again(self, rows, experts, delta):
        """The counters by which the last program knows itself must be zero after each launch."""
        case = case_of(rows, experts)
        first = run(case, delta)
        compare(first, case, delta)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(run(case, delta), first, strict=True))

    def test_padding_rows_choose_nobody(self, rows, experts):
        case = case_of(rows, experts)
        live = (torch.arange(rows, device="cuda") % 3 > 0).int() * 9
        *_, weights, ids = run(case, live=live)
        *_, want_weights, want_ids = run(case)
        real = live > 0
        assert (ids[~real] == -1).all()
        assert (weights[~real] == 0).all()
        assert torch.equal(ids[real], want_ids[real])
        assert torch.equal(weights[real], want_weights[real])


class TestOrder:
    pytestmark = ON_HOPPER

    def order(self, logits: list[float], top_k: int = 4) -> list[int]:
        """Of 32 experts with these logits, the others' far below."""
        case = case_of(8)
        bias = torch.full((32,), -300.0, dtype=torch.bfloat16, device="cuda")
        bias[: len(logits)] = torch.tensor(logits)
        case = replace(case, router_weight=torch.zeros_like(case.router_weight), router_bias=bias)
        *_, weights, ids = run(case, top_k=top_k)
        assert (ids == ids[0]).all()
        assert torch.allclose(weights, torch.softmax(bias[ids.long()].float(), -1), atol=1e-6)
        return ids[0].tolist()

    def test_of_equals_the_first(self):
        assert self.order([2.0] * 9) == [0, 1, 2, 3]
        assert self.order([1.0, 2.0, 1.0, 2.0, 1.0, 1.0]) == [1, 3, 0, 2]

    def test_negative_ones_in_their_order_and_one_zero(self):
        assert self.order([-3.0, -1.0, -2.0, -0.5, -4.0]) == [3, 1, 2, 0]
        assert self.order([-1.0, -0.0, 0.0, 1e-30, -1e-30]) == [3, 1, 2, 4]

    def test_one_expert_and_many(self):
        assert self.order([1.0, 5.0], top_k=1) == [1]
        assert self.order([float(i) for i in range(8)], top_k=7) == [7, 6, 5, 4, 3, 2, 1]


MUTATIONS = {
    "bias dropped": ("shift.to(gl.float32)).to", "0 * shift.to(gl.float32)).to"),
    "the last inputs lost": ("mma_v2(weight_b, x_b, each)", "mma_v2(weight_b, 0 * x_b, each)"),
    "the first inputs again": (
        "group * ROWS, BLOCK_A, BLOCK_B, HIDDEN, RIGHT",
        "group * ROWS, 0, BLOCK_B, HIDDEN, RIGHT",
    ),
    "rows of the first group": ("normed + (group * ROWS)", "normed + (0 * group)"),
    "a part's experts in the first one's place": ("expert = part * SHARE +", "expert = 0 * part +"),
    "the first experts in every program": ("weights_of(weight, part * SHARE, 0,", "weights_of(weight, 0 * part, 0,"),
    "negative ones turned around": ("bits = gl.where(bits < 0, bits ^ 0x7FFF, bits)\n        key", "key"),
    "an expert taken again": ("gl.where(key == largest, NOTHING, key)", "key"),
    "the last one without a weight": ("chosen = gl.where(slot < TOP_K,", "chosen = gl.where(slot < TOP_K - 1,"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
class TestMutations:
    pytestmark = ON_HOPPER

    def test_the_comparison_notices(self, mutation, monkeypatch, tmp_path):
        from npu_gptoss.dense.triton import router_hopper

        case = case_of(40, 128)
        # biases that choose, and all logits negative
        case = replace(case, router_bias=case.router_bias * 4 - 12)
        compare(run(case), case)
        changed = mutated(tmp_path, *MUTATIONS[mutation], of=router_hopper)
        monkeypatch.setattr(router_hopper, "router_kernel", changed.router_kernel)
        with pytest.raises(AssertionError, match=r"differ|order|left out|twice"):
            compare(run(case), case)
