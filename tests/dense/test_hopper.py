"""The Gluon projections and router on a Hopper GPU: against the definition, at every size of ring, at ties, and their
mistakes; and where they are selected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from npu_gptoss import dense
from npu_gptoss.dense import reference
from npu_gptoss.dense.operations import LOGITS, OUTPUT, QKV, ROUTER
from npu_gptoss.kernels import Bound, platform_override
from npu_gptoss.kernels.platform import SUPPORTED
from tests.attention.triton_run import mutated
from tests.dense import test_kernels as cpu
from tests.dense.cases import Case, Outputs, Sizes, make_case
from tests.triton import ON_HOPPER

launch_hopper = pytest.importorskip("npu_gptoss.dense.triton.launch_hopper", reason="needs triton")
Ring = launch_hopper.Ring

FULL = Sizes(hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=32, top_k=4, vocab=300)
# inputs and rows that fill no tile: 200 = 3 * 64 + 8, and 6 heads of 64
ODD = Sizes(hidden=200, heads=6, kv_heads=2, head_dim=64, experts=8, top_k=4, vocab=300)
# each ring with some rows: less than a tile of them, a tile, padding behind the real ones; short and long inputs
CASES = [
    (FULL, 1, 1, Ring(256, 2, splits=4)),
    (FULL, 8, 8, Ring(128, 3, splits=2)),
    (FULL, 16, 16, Ring(64, 2)),
    (FULL, 64, 24, Ring(128, 6, splits=3)),
    (ODD, 2, 2, Ring(64, 2)),
    (ODD, 5, 3, Ring(128, 3, splits=2)),
    (ODD, 30, 20, Ring(256, 2, splits=4)),
    (ODD, 70, 24, Ring(64, 4, splits=3)),
    (FULL, 32, 24, Ring(128, 6)),
]


def run_qkv(case: Case, **changes: object) -> Outputs:
    """The kernel alone: normed rows to queries and caches."""
    keys, values = case.caches()
    normed = reference.add_norm(case.residual, case.delta, case.norm, case.eps, torch.bfloat16)[1]
    query = launch_hopper.project(
        normed, case.qkv_weight, case.qkv_bias, case.cos_sin, case.positions, keys, values, case.metadata, **changes
    )
    return query, keys, values


def run_output(case: Case, **changes: object) -> Outputs:
    return tuple(
        launch_hopper.linear(case.attended, case.output_weight, bias, residual, **changes)
        for bias, residual in ((case.output_bias, case.residual), (None, None))
    )


def definition_of_qkv(case: Case) -> Outputs:
    return case.run("qkv", reference.qkv)[1:]


def definition_of_output(case: Case) -> Outputs:
    return tuple(
        reference.output(case.attended, case.output_weight, bias, residual)
        for bias, residual in ((case.output_bias, case.residual), (None, None))
    )


def compare(got: Outputs, want: Outputs) -> None:
    for mine, exact in zip(got, want, strict=True):
        error = (mine.float() - exact.float()).norm() / exact.float().norm()
        assert torch.isfinite(mine).all(), "not finite"
        assert error < 5e-3, f"differs by {error:.1e}"  # bf16 rounds by 1.7e-3, the product before RoPE once more


@pytest.mark.parametrize(("sizes", "rows", "real", "ring"), CASES, ids=str)
class TestOnHopper:
    pytestmark = ON_HOPPER

    def test_queries_keys_and_values_are_those_of_the_definition(self, sizes, rows, real, ring):
        case = make_case(rows, real, sizes=sizes, device="cuda")
        compare(run_qkv(case, ring=replace(ring, splits=1)), definition_of_qkv(case))

    def test_outputs_are_those_of_the_definition_again_and_again(self, sizes, rows, real, ring):
        """The counters by which the last program knows itself must be zero after each launch."""
        case = make_case(rows, real, sizes=sizes, device="cuda")
        first = run_output(case, ring=ring)
        compare(first, definition_of_output(case))
        for _ in range(5):
            assert all(torch.equal(a, b) for a, b in zip(run_output(case, ring=ring), first, strict=True))


@pytest.mark.parametrize("rows", [1, 2, 8, 13, 24])
class TestSelected:
    pytestmark = ON_HOPPER

    def test_values_beside_keys_in_one_tensor_are_written_exactly(self, rows):
        case = make_case(rows, sizes=FULL, device="cuda")
        cpu.assert_that_one_tensor_for_keys_and_values_gets_the_same_bits(cpu.triton_kernel("qkv.gluon"), case)

    def test_rows_that_begin_elsewhere_are_moved(self, rows):
        """The tensor memory accelerator would read them from the multiple of 16 bytes before."""
        case = make_case(rows, sizes=FULL, device="cuda")
        inputs = case.attended.shape[1]
        shifted = torch.empty(rows * inputs + 1, dtype=torch.bfloat16, device="cuda")[1:].view(rows, inputs)
        shifted.copy_(case.attended)
        output = cpu.triton_kernel("output.gluon")
        assert torch.equal(case.run("output", output)[0], case.run("output", output, attended=shifted)[0])

    def test_logits_of_rows_that_begin_elsewhere_are_the_same(self, rows):
        case = make_case(rows, sizes=FULL, device="cuda")
        logits = cpu.triton_kernel("logits.gluon")
        shifted = torch.empty(case.delta.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view_as(case.delta)
        shifted.copy_(case.delta)
        assert torch.equal(case.run("logits", logits)[0], case.run("logits", logits, normed=shifted)[0])


MUTATIONS: dict[str, tuple[str, str, str]] = {
    "values turned too": ("qkv_kernel", "head < HEADS + KV_HEADS:\n        first,", "head < 99999:\n        first,"),
    "keys not turned": ("qkv_kernel", "head < HEADS + KV_HEADS:\n        first,", "head < HEADS:\n        first,"),
    "halves of a head swapped": ("qkv_kernel", "packed.slice(HALF, HALF, 0)", "packed.slice(0, HALF, 0)"),
    "a head's keys in the next one's place": (
        "qkv_kernel",
        "KV_HEADS + head - HEADS) *",
        "KV_HEADS + (head - HEADS + 1) % KV_HEADS) *",
    ),
    "a tile of weights read again": ("linear_kernel", "(weights, [row, at],", "(weights, [row, at - BLOCK_K],"),
    "a share lost": ("linear_kernel", "gl.static_range(SPLITS)", "gl.static_range(SPLITS - 1)"),
    "all programs read the first share": ("linear_kernel", "first = split * (STEPS", "first = 0 * (STEPS"),
    "sums of another tile": ("linear_kernel", "series.to(gl.int64) *", "0 * series.to(gl.int64) *"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
class TestMutations:
    pytestmark = ON_HOPPER

    def test_the_comparison_notices(self, mutation, monkeypatch, tmp_path):
        from npu_gptoss.dense.triton import hopper

        kernel, old, new = MUTATIONS[mutation]
        run, definition = (run_qkv, definition_of_qkv) if kernel == "qkv_kernel" else (run_output, definition_of_output)
        case = make_case(8, sizes=FULL, device="cuda")
        compare(run(case), definition(case))
        monkeypatch.setattr(hopper, kernel, getattr(mutated(hopper, tmp_path, (old, new)), kernel))
        with pytest.raises(AssertionError, match=r"differs by|not finite"):
            compare(run(case), definition(case))


# the router


def case_of(rows: int, experts: int = 32) -> Case:
    return make_case(rows, min(rows, 24), sizes=replace(FULL, experts=experts), device="cuda")


def run_router(case: Case, delta: bool = True, **changes: object) -> Outputs:
    return case.run("router", cpu.triton_kernel("router.gluon"), delta, **changes)


def compare_routed(got: Outputs, case: Case, delta: bool = True) -> None:
    """Logits may be rounded the other way, and then others be chosen: within that, the largest in their order."""
    residual, normed, weights, ids = got
    assert torch.equal(residual, case.residual + case.delta if delta else case.residual), "differs: the residual"
    exact = reference.add_norm(residual, None, case.norm, case.eps, torch.bfloat16)[1]
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
class TestRouterOnHopper:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize("delta", [True, False])
    def test_the_largest_are_chosen_again_and_again(self, rows, experts, delta):
        """The counters by which the last program knows itself must be zero after each launch."""
        case = case_of(rows, experts)
        first = run_router(case, delta)
        compare_routed(first, case, delta)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(run_router(case, delta), first, strict=True))

    def test_padding_rows_choose_nobody(self, rows, experts):
        case = case_of(rows, experts)
        live = (torch.arange(rows, device="cuda") % 3 > 0).int() * 9
        *_, weights, ids = run_router(case, live=live)
        *_, want_weights, want_ids = run_router(case)
        real = live > 0
        assert (ids[~real] == -1).all()
        assert (weights[~real] == 0).all()
        assert torch.equal(ids[real], want_ids[real])
        assert torch.equal(weights[real], want_weights[real])


class TestRouterOrder:
    pytestmark = ON_HOPPER

    @pytest.mark.parametrize(("rows", "experts"), [(3, 32), (33, 128)])
    def test_a_row_of_nan_chooses_experts_that_are_there(self, rows, experts):
        kernel = cpu.triton_kernel("router.gluon")
        cpu.assert_that_nan_chooses_experts_that_are_there(kernel, case_of(rows, experts), experts)

    def order(self, logits: list[float], top_k: int = 4) -> list[int]:
        """Of 32 experts with these logits, the others' far below."""
        case = case_of(8)
        bias = torch.full((32,), -300.0, dtype=torch.bfloat16, device="cuda")
        bias[: len(logits)] = torch.tensor(logits)
        case = replace(case, router_weight=torch.zeros_like(case.router_weight), router_bias=bias)
        *_, weights, ids = run_router(case, top_k=top_k)
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


ROUTER_MUTATIONS = {
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


@pytest.mark.parametrize("mutation", ROUTER_MUTATIONS)
class TestRouterMutations:
    pytestmark = ON_HOPPER

    def test_the_comparison_notices(self, mutation, monkeypatch, tmp_path):
        from npu_gptoss.dense.triton import router_hopper

        case = case_of(40, 128)
        # biases that choose, and all logits negative
        case = replace(case, router_bias=case.router_bias * 4 - 12)
        compare_routed(run_router(case), case)
        changed = mutated(router_hopper, tmp_path, ROUTER_MUTATIONS[mutation])
        monkeypatch.setattr(router_hopper, "router_kernel", changed.router_kernel)
        with pytest.raises(AssertionError, match=r"differ|order|left out|twice"):
            compare_routed(run_router(case), case)


# where they are selected


@pytest.fixture
def hopper() -> Iterator[None]:
    with platform_override(SUPPORTED["cuda"]):
        yield


def names(bound: Bound) -> list[tuple[int, str]]:
    return [(most, run.name.partition(".")[2]) for most, run in bound.ranges][:-1]


@pytest.mark.usefixtures("hopper")
def test_sizes_that_the_kernels_cannot_multiply_go_to_other_kernels():
    weight = torch.zeros(128, 64, dtype=torch.bfloat16)
    bf16 = torch.bfloat16
    assert names(dense.bound(OUTPUT, bf16, weight)) == [(0, "output.triton_gemv"), (32, "output.gluon")]
    assert names(dense.bound(QKV, bf16, weight, bf16, 64)) == [(0, "qkv.triton_gemv"), (32, "qkv.gluon")]
    assert names(dense.bound(QKV, bf16, weight, bf16, 16)) == [(1, "qkv.triton_gemv")], "heads of another size"
    others = {
        "rows of 120 bytes": weight[:, :60].contiguous(),
        "columns first": weight.t().contiguous().t(),
        "begins at byte 2": torch.zeros(128 * 64 + 1, dtype=bf16)[1:].view(128, 64),
    }
    for what, each in others.items():
        assert names(dense.bound(OUTPUT, bf16, each)) == [(1, "output.triton_gemv")], what
        assert names(dense.bound(LOGITS, bf16, each)) == [(1, "logits.triton_gemv")], what
    assert names(dense.bound(LOGITS, bf16, weight)) == [(1, "logits.triton_gemv"), (32, "logits.gluon")]
    assert names(dense.bound(OUTPUT, torch.float32, weight.float())) == []


@pytest.mark.usefixtures("hopper")
def test_sizes_that_the_kernel_cannot_route_go_to_other_kernels():
    def routed(experts: int, hidden: int = 2880) -> int | None:
        """From how many rows on."""
        bound = dense.bound(ROUTER, torch.bfloat16, torch.zeros(experts, hidden, dtype=torch.bfloat16))
        assert names(bound)[-1][0] == 256
        found = dict(names(bound))
        return min(found) + 1 if "router.gluon" in found.values() else None

    assert [routed(experts) for experts in (32, 64, 128, 256)] == [128, 64, 33, 33]
    assert routed(24) is None, "no power of two"
    assert routed(16) is None, "fewer than a program takes"
    assert routed(32, 1024) is None, "nothing for some warps"
    assert routed(32, 2876) is None, "rows of 5752 bytes"
    assert [routed(32, hidden) for hidden in (1536, 1544, 2048, 2560, 2568, 4096)] == [None, 128, 128, None, 128, 128]
