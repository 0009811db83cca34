"""A single token's experts as matrix-vector products: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from npu_gptoss.errors import InputError
from npu_gptoss.moe import Mxfp4Experts
from npu_gptoss.moe.triton import layout
from npu_gptoss.moe.triton.gemv_launch import expert_mlp_gemv
from tests.moe import test_triton as triton_tests
from tests.moe.test_triton import DEVICE, EXPERTS, Call, check, make_call, make_experts, slices

pytestmark = triton_tests.pytestmark
cuda_kernels, nan_in_new_memory = triton_tests.cuda_kernels, triton_tests.nan_in_new_memory


@pytest.fixture(scope="module")
def weights() -> Mxfp4Experts:
    return make_experts("mxfp4")


def run(call: Call, **settings: object) -> torch.Tensor:
    prepared = layout.prepare(call.weights, call.limit)
    return expert_mlp_gemv(call.hidden, prepared, call.topk_weights, call.topk_ids, call.limit, **settings)


# Inputs that are no whole tiles of 64, rows that are no multiple of a program's.
@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (192, 160), (96, 64)])
def test_products_equal_the_definition(hidden: int, inner: int) -> None:
    call = make_call(make_experts("mxfp4", hidden=hidden, inner=inner), 1)
    check(call, run(call))


@pytest.mark.parametrize("settings", [{"chunk": 1}, {"down_chunk": 1, "down_rows": 16}, {"down_rows": 4}, {"warps": 8}])
def test_the_cut_into_programs_changes_nothing(weights: Mxfp4Experts, settings: dict[str, int]) -> None:
    call = make_call(weights, 1)
    check(call, run(call, **settings))


def test_experts_of_other_ranks_and_padding_are_not_read(weights: Mxfp4Experts) -> None:
    call = make_call(weights, 1)
    for first, last in ((0, 3), (3, EXPERTS)):
        local = dataclasses.replace(call, weights=slices(weights, first, last))
        check(local, run(local))
    ids = call.topk_ids.clone()
    ids[0, 1] = -1
    padded = dataclasses.replace(call, topk_ids=ids)
    share = dataclasses.replace(call, topk_weights=call.topk_weights * torch.tensor([[1.0, 0, 1, 1]], device=DEVICE))
    check(share, run(padded))


def test_a_padding_row_gives_zero(weights: Mxfp4Experts) -> None:
    call = make_call(weights, 1)
    assert run(dataclasses.replace(call, topk_ids=torch.full_like(call.topk_ids, -1))).abs().max() == 0


def changed(**changes: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Call], Call]:
    def change(call: Call) -> Call:
        tensors = {name: function(getattr(call.weights, name)) for name, function in changes.items()}
        return dataclasses.replace(call, weights=dataclasses.replace(call.weights, **tensors))

    return change


MISTAKES = {
    "gate_up bias dropped": changed(gate_up_proj_bias=torch.zeros_like),
    "down bias dropped": changed(down_proj_bias=torch.zeros_like),
    "gate and up swapped": changed(
        gate_up_proj_blocks=lambda w: w.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
        gate_up_proj_scales=lambda w: w.unflatten(1, (-1, 2)).flip(2).flatten(1, 2),
    ),
    "nibbles swapped": changed(down_proj_blocks=lambda w: (w >> 4) | (w << 4)),
    "scales of the neighbouring group": changed(down_proj_scales=lambda s: s.flip(-1)),
    "one scale a row": changed(gate_up_proj_scales=lambda s: s[..., :1].expand_as(s).contiguous()),
    "weights of another expert": changed(down_proj_blocks=lambda w: w.roll(1, 0)),
    "unweighted sum": lambda call: dataclasses.replace(call, topk_weights=torch.full_like(call.topk_weights, 0.25)),
    "limit 6": lambda call: dataclasses.replace(call, limit=6.0),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_check_sees(weights: Mxfp4Experts, mistake: str) -> None:
    call = make_call(weights, 1)
    with pytest.raises(AssertionError):
        check(call, run(MISTAKES[mistake](call)))


def test_more_tokens_and_other_formats_are_refused(weights: Mxfp4Experts) -> None:
    with pytest.raises(InputError, match="takes one token in mxfp4, got 2 in mxfp4"):
        run(make_call(weights, 2))
    with pytest.raises(InputError, match="got 1 in bfloat16"):
        run(make_call(make_experts("bfloat16"), 1))
