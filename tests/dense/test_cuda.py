"""The Triton kernels on a GPU in bf16, at gpt-oss's sizes, against the definition and plain torch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu_gptoss.dense import reference, small_ops
from tests.dense import test_kernels as cpu
from tests.dense.cases import Case, Sizes, make_case
from tests.tolerances import assert_close

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: make test-cuda"),
]

SIZES = Sizes(hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=32, top_k=4, vocab=20_011)
ROWS = [(1, 1), (8, 5), (64, 24), (256, 24), (300, 24)]


@pytest.fixture(scope="module")
def cases() -> Callable[[int, int], Case]:
    made: dict[tuple[int, int], Case] = {}

    def case(rows: int, real: int) -> Case:
        if (rows, real) not in made:
            made[rows, real] = make_case(rows, real, sizes=SIZES, device="cuda")
        return made[rows, real]

    return case


def definitions(name: str) -> tuple[Callable, Callable]:
    return getattr(small_ops, name), getattr(reference, name)


PARAMETERS = [
    pytest.param(name, kernel, rows, real, id=f"{kernel.__name__}-{rows}")
    for name, kernel in (
        ("qkv", cpu.QKV[1]),
        ("qkv", cpu.QKV[2]),
        ("output", cpu.OUTPUT[1]),
        ("add_norm", cpu.ADD_NORM[1]),
        ("logits", cpu.LOGITS[1]),
    )
    for rows, real in (ROWS[:1] if kernel.__name__.endswith("gemv") else ROWS)
]


@pytest.mark.parametrize(("name", "kernel", "rows", "real"), PARAMETERS)
@pytest.mark.parametrize("delta", [True, False])
def test_bf16_is_as_near_to_the_definition_as_plain_torch_in_bf16(
    name: str, kernel: Callable, rows: int, real: int, delta: bool, cases: Callable[[int, int], Case]
) -> None:
    case = cases(rows, real)
    got, portable, want = (case.run(name, each, delta) for each in (kernel, *definitions(name)))
    for mine, theirs, exact in zip(got, portable, want, strict=True):
        error, allowed = ((t.float() - exact.float()).norm() / exact.float().norm() for t in (mine, theirs))
        assert torch.isfinite(mine).all()
        # another order of sums moves a few results by a rounding, which is 1.7e-3 of one
        assert error <= 1.1 * allowed + 5e-4, f"error {error:.2e}, plain torch {allowed:.2e}"


@pytest.mark.parametrize("kernel", cpu.QKV[1:])
def test_values_beside_keys_in_one_tensor_are_written_exactly(
    kernel: Callable, cases: Callable[[int, int], Case]
) -> None:
    cpu.assert_that_one_tensor_for_keys_and_values_gets_the_same_bits(kernel, cases(*ROWS[0]))


@pytest.mark.parametrize(("rows", "real"), ROWS)
@pytest.mark.parametrize("kernel", cpu.ROUTER[1:])
def test_the_router_chooses_as_plain_torch_but_for_ties(
    kernel: Callable, rows: int, real: int, cases: Callable[[int, int], Case]
) -> None:
    case = cases(rows, real)
    residual, normed, weights, ids = case.run("router", kernel)
    want = case.run("router", small_ops.router)
    assert torch.equal(residual, want[0])
    assert (normed != want[1]).float().mean() < 1e-3  # a square root that rounds the other way
    logits = torch.nn.functional.linear(normed, case.router_weight, case.router_bias).float()
    chosen = logits.gather(1, ids.long())
    worst_chosen = logits.topk(4, dim=-1).values[:, -1:]
    assert (chosen >= worst_chosen - worst_chosen.abs() * 2**-7).all()  # one rounding of a bf16 logit
    assert (ids.long().sort(1).values.diff(dim=1) > 0).all()  # each expert once
    assert_close(weights, torch.softmax(chosen, -1), torch.bfloat16)


@pytest.mark.parametrize("first", [True, False])
def test_the_residual_stream_is_bit_for_bit_that_of_plain_torch(first: bool) -> None:
    """first: the stream is the embedding, in bf16."""
    case = make_case(64, 24, sizes=SIZES, device="cuda", first=first)
    assert torch.equal(case.run("add_norm", cpu.ADD_NORM[1])[0], case.residual.float() + case.delta)


@pytest.mark.parametrize("kernel", cpu.ROUTER)
def test_a_row_of_nan_chooses_experts_that_are_there(kernel: Callable) -> None:
    case = make_case(3, sizes=SIZES, device="cuda")
    cpu.assert_that_nan_chooses_experts_that_are_there(kernel, case, SIZES.experts)


@pytest.mark.parametrize("rows", [1, 8, 130])
def test_greedy_at_the_vocabularys_size(rows: int) -> None:
    logits = torch.randn(rows, 201_088, device="cuda").to(torch.bfloat16)
    logits[0, 200_001] = logits[0, 7] = 9.0
    want = logits.float().argmax(-1)
    want[0] = 7
    if rows > 1:
        logits[1, 201_087] = float("nan")
        want[1] = -1
    firsts = (logits == logits.amax(-1, keepdim=True)).int().argmax(-1)
    out = torch.empty(rows, dtype=torch.int64, device="cuda")
    cpu.GREEDY[1](logits=logits, out=out)
    assert torch.equal(out, torch.where(want < 0, want, firsts))
