"""A single token's Gluon kernels for Hopper against the definition: edges of steps, shares and rows; mutations. Needs
the GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_gptoss.moe import Mxfp4Experts
from npu_gptoss.moe.triton import tuned
from tests.attention.triton_run import mutated
from tests.moe.hopper import ON_HOPPER, with_tiles
from tests.moe.test_triton import EXPERTS, TOP_K, check, make_call, make_experts, slices

pytestmark = ON_HOPPER
KERNEL = "moe.experts.gluon_one"

# beside the shape that is used: tiles lower than the layout's, a loop that ends in its middle, a share without inputs
OTHER = tuned.OneTiles(warps=1, deep=3, down_deep=2, splits=3, registers=168)


@pytest.fixture(autouse=True, params=[tuned.ONE, OTHER], ids=["used", "other"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with with_tiles(monkeypatch, "ONE", request.param):
        yield


@pytest.fixture(scope="module")
def uneven() -> Mxfp4Experts:
    """Rows that fill no tile, inputs that fill no step and no share."""
    return make_experts("mxfp4", hidden=1120, inner=800)


@pytest.mark.parametrize(
    ("hidden", "inner"), [(32, 32), (96, 160), (256, 64), (288, 544), (2880, 1440), (2880, 2880), (6144, 3072)]
)
def test_any_rows_and_inputs(hidden, inner):
    call = make_call(make_experts("mxfp4", hidden=hidden, inner=inner), 1)
    check(call, call.run(KERNEL))


def test_every_expert_of_120b_can_be_chosen():
    weights = make_experts("mxfp4", experts=128, hidden=2880, inner=2880)
    for seed in range(4):
        call = make_call(weights, 1, seed=seed)
        call.topk_ids[0, 0] = (0, 127, 64, 1)[seed]
        check(call, call.run(KERNEL))


def test_experts_of_other_ranks_and_padding_are_skipped_and_never_multiplied(uneven):
    call = make_call(slices(uneven, 2, 5), 1, experts=EXPERTS)
    call.topk_ids[0] = torch.tensor([7, 3, -1, 4], device="cuda")
    check(call, call.run(KERNEL))


def test_a_rank_to_which_no_token_comes_gives_zero(uneven):
    call = make_call(slices(uneven, 4, 8), 1, experts=EXPERTS)
    call.topk_ids[:] = torch.arange(TOP_K, device="cuda")
    assert bool((call.run(KERNEL) == 0).all())


@pytest.mark.parametrize("exponent", [-60, -20, 20])
def test_small_and_large_inputs_are_not_lost_in_the_products(uneven, exponent):
    """The weights are opened as denormals; without biases and clamp, what comes out is as small or large."""
    none = {"gate_up_proj_bias": uneven.gate_up_proj_bias * 0, "down_proj_bias": uneven.down_proj_bias * 0}
    call = make_call(dataclasses.replace(uneven, **none), 1)
    call.hidden *= 2.0**exponent
    call.limit = 1e30
    check(call, call.run(KERNEL))


def test_the_same_call_gives_the_same_bits(uneven):
    call = make_call(uneven, 1)
    want = call.run(KERNEL)
    assert all(torch.equal(call.run(KERNEL), want) for _ in range(20))


def test_the_second_projection_asks_for_its_weights_before_it_waits():
    from npu_gptoss.moe.triton import launches, one_hopper

    call = make_call(make_experts("mxfp4", hidden=2880, inner=2880), 1)
    one_hopper.down.device_caches.clear()
    call.run(KERNEL)
    ((kernels, *_),) = one_hopper.down.device_caches.values()
    (compiled,) = kernels.values()
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    steps = -(-12 // launches.ONE.splits)  # of 256 inputs
    assert before.count("ld.global.v4.b32") == 4 * min(launches.ONE.down_deep, steps)
    assert "ld.global.v4.b32" in after  # the inputs


MUTATIONS: dict[str, tuple[str, str]] = {
    "exponents of the next group": ("(ROWS * 4) + n % 4)", "(ROWS * 4) + (n + 1) % 4)"),
    "exponents of the first tiles": ("n // 4 * (ROWS * 4)", "n // 4 * 0"),
    "exponents of the first step for all": ("scale + step * (STEP // 2 * ROWS * 4)", "scale"),
    "weights of the first step for all": ("word + step * (STEP * ROWS * WORDS)", "word"),
    "weights of the first tile for all": ("j // WORDS * (ROWS * WORDS) + j % WORDS", "j % WORDS"),
    "weights of the first rows for all": ("+ inside * WORDS", "+ 0 * inside * WORDS"),
    "weights of the first expert": ("expert * KEPT", "0 * KEPT"),
    "weights of the first share for all": (
        "load_step(word, scale, begin + at,",
        "load_step(word, scale, 0 * begin + at,",
    ),
    "the steps before once more": ("begin + first + DEEP + at", "begin + first + at"),
    "inputs of the first share for all": ("at = begin * (STEP * INPUTS)", "at = 0 * begin * (STEP * INPUTS)"),
    "inputs of the first step for all": ("x_tiles.index(first + at)", "x_tiles.index(0 * first)"),
    "inputs of the other codes": ("PAIR * 4 + tile * 2 + HALF", "PAIR * 4 + tile * 2 + 1 - HALF"),
    "inputs of the other tiles": ("PAIR * 4 + tile * 2 + HALF", "(1 - PAIR) * 4 + tile * 2 + HALF"),
    "inputs of the last slot": ("inner + slot * K", "inner + (gl.num_programs(1) - 1) * K"),
    "bias in each share": ("mask=(m < R) & (split == 0)", "mask=m < R"),
    "bias of the first expert": ("(bias + expert * R + m, mask=m < R", "(bias + m, mask=m < R"),
    "routing weight dropped": ("sums * gl.load(topk_weights + slot)", "sums"),
    "gate not clamped": ("gate = gl.minimum(gate.reshape([8 * WARPS]), limit)", "gate = gate.reshape([8 * WARPS])"),
    "up not clamped below": (
        "gl.minimum(gl.maximum(up.reshape([8 * WARPS]), -limit), limit)",
        "gl.minimum(up.reshape([8 * WARPS]), limit)",
    ),
    "alpha left out": ("gate * -ALPHA", "gate * -1.0"),
}


@pytest.mark.parametrize("tiles", [OTHER], ids=["other"], indirect=True)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_notices_a_mistake(uneven, mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from npu_gptoss.moe.triton import one_hopper

    call = make_call(uneven, 1)
    check(call, call.run(KERNEL))
    wrong = mutated(one_hopper, tmp_path, MUTATIONS[mutation])
    monkeypatch.setattr(one_hopper, "gate_up", wrong.gate_up)
    monkeypatch.setattr(one_hopper, "down", wrong.down)
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check(call, call.run(KERNEL))
