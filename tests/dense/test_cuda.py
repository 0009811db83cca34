"""The Triton kernels on a GPU in bf16, at gpt-oss's sizes: what `npu-gptoss verify` does not compare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from npu_gptoss.dense import Shortlist, logits, small_ops, token
from tests.dense import test_kernels as cpu
from tests.dense import test_shortlist as shortlist
from tests.dense.cases import Case, Sizes, make_case
from tests.tolerances import assert_close

pytestmark = pytest.mark.cuda

SIZES = Sizes(hidden=2880, heads=64, kv_heads=8, head_dim=64, experts=32, top_k=4, vocab=20_011)
ROWS = [(1, 1), (8, 5), (64, 24), (256, 24), (300, 24)]


def on_gpu(rows: int, real: int, **changes: object) -> Case:
    return make_case(rows, real, sizes=SIZES, device="cuda", **changes)


@pytest.mark.parametrize("kernel", cpu.QKV[1:])
def test_values_beside_keys_in_one_tensor_are_written_exactly(kernel: Callable) -> None:
    cpu.assert_that_one_tensor_for_keys_and_values_gets_the_same_bits(kernel, on_gpu(1, 1))


@pytest.mark.parametrize(("rows", "real"), ROWS)
@pytest.mark.parametrize("kernel", cpu.ROUTER[1:])
def test_the_router_chooses_as_plain_torch_but_for_ties(kernel: Callable, rows: int, real: int) -> None:
    case = on_gpu(rows, real)
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
    case = on_gpu(64, 24, first=first)
    assert torch.equal(case.run("add_norm", cpu.ADD_NORM[1])[0], case.residual.float() + case.delta)


@pytest.mark.parametrize("kernel", cpu.ROUTER)
def test_a_row_of_nan_chooses_experts_that_are_there(kernel: Callable) -> None:
    cpu.assert_that_nan_chooses_experts_that_are_there(kernel, on_gpu(3, 3), SIZES.experts)


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


def test_no_logit_is_above_its_bound_and_no_largest_below() -> None:
    shortlist.test_no_logit_is_above_its_bound_and_no_largest_below()


@pytest.mark.parametrize("rows", [1, 7, 32])
@pytest.mark.parametrize("drawn", [False, True])
def test_a_token_by_shortlist_at_the_vocabularys_size(rows: int, drawn: bool) -> None:
    """Of logits that another kernel sums: it may differ where two tokens are one rounding apart."""
    torch.manual_seed(rows)
    weight = (torch.randn(201_088, 2880, device="cuda") * 0.02).bfloat16()
    normed = torch.randn(rows, 2880, device="cuda").bfloat16()
    noise = torch.randn(rows, 201_088, device="cuda") if drawn else None
    found = token(normed, weight, Shortlist.of(weight), noise, kernel="shortlist")
    values = logits(normed, weight, kernel="small_ops").float() + (0 if noise is None else noise)
    largest = values.amax(1)
    assert ((largest - values.gather(1, found[:, None])[:, 0]) <= largest.abs() * 2**-7).all()
    assert (found == values.argmax(1)).float().mean() > 0.8
