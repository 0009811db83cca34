"""The experts' Gluon kernel for Hopper against the definition: edges of tiles and groups; mutations. Needs the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_gptoss.moe import Mxfp4Experts
from npu_gptoss.moe.triton import tuned
from tests.attention.triton_run import mutated
from tests.moe.hopper import ON_HOPPER, grouped_call, with_tiles
from tests.moe.test_triton import check, make_call, make_experts, slices

pytestmark = ON_HOPPER
KERNEL = "moe.experts.gluon_many"

# Slots of each expert: none, one, around half a tile and a whole one, of either shape
GROUPS = (0, 1, 63, 64, 65, 127, 128, 129, 192, 193, 256, 257, 300)


@pytest.fixture(autouse=True, params=[shape for _, shape in tuned.GLUON], ids=["wide", "tall"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with with_tiles(monkeypatch, "gluon_tiles", lambda slots, experts: request.param):
        yield


@pytest.fixture(scope="module")
def uneven() -> Mxfp4Experts:
    """Rows that fill neither tiles nor groups of warps, an odd number of steps in one product and an even one in the
    other."""
    return make_experts("mxfp4", experts=len(GROUPS), hidden=192, inner=256)


def test_groups_that_end_at_every_edge_of_a_tile(uneven):
    call = grouped_call(uneven, GROUPS)
    check(call, call.run(KERNEL))


@pytest.mark.parametrize(("hidden", "inner"), [(192, 128), (320, 192), (2880, 2880)])
def test_any_whole_number_of_steps_and_any_rows(hidden, inner):
    weights = make_experts("mxfp4", experts=5, hidden=hidden, inner=inner)
    call = make_call(weights, 700)
    check(call, call.run(KERNEL))


def test_experts_of_other_ranks_and_padding_are_skipped_and_never_multiplied(uneven):
    call = make_call(slices(uneven, 2, 9), 400, experts=len(GROUPS))
    call.topk_ids[30:40] = -1
    call.topk_weights[30:40] = 0
    call.hidden[30:40] = float("nan")
    got = call.run(KERNEL)
    check(call, got)
    assert bool((got[30:40] == 0).all())


def test_a_rank_to_which_no_token_comes_gives_zero(uneven):
    call = make_call(slices(uneven, 8, 13), 300, experts=len(GROUPS))
    call.topk_ids[:] = torch.arange(4, device="cuda")
    assert bool((call.run(KERNEL) == 0).all())


def test_the_published_shape_with_every_expert_of_120b():
    call = make_call(make_experts("mxfp4", experts=128, hidden=2880, inner=2880), 5000)
    check(call, call.run(KERNEL))


def test_the_same_call_gives_the_same_bits(uneven):
    call = make_call(uneven, 3000)
    want = call.run(KERNEL)
    assert all(torch.equal(call.run(KERNEL), want) for _ in range(10))


MUTATIONS: dict[str, tuple[str, str]] = {
    "half a tile where more is there": ("end - first > COLUMNS // 2", "end - first > COLUMNS // 2 + 1"),
    "the last slot of a group lost": ("real = place < end", "real = place < end - 1"),
    "weights of the first rows for all": (
        "word_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT)",
        "word_tiles.index(stage).slice(0, HEIGHT)",
    ),
    "exponents of the first rows for all": (
        "scale_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT)",
        "scale_tiles.index(stage).slice(0, HEIGHT)",
    ),
    "exponents of the other step": ("after, (step + 1) % 2 * 16, NUMBER", "after, step % 2 * 16, NUMBER"),
    "exponents of the first steps": ("scale + step // 2 * ROWS", "scale"),
    "inputs of the first step for all": ("source + step * INPUTS", "source"),
    "bias dropped": ("sums += gl.load(bias", "sums += 0 * gl.load(bias"),
    "bias of the first expert": ("bias + expert * R + m", "bias + m"),
    "weights of the first expert": ("word_tile = expert * KEPT", "word_tile = 0 * KEPT"),
    "inputs of another token": ("gl.load(order + place) // TOP_K", "gl.load(order + place) * 0"),
    "routing weight dropped": (
        "result = sums * gl.convert_layout(weight",
        "result = sums + 0 * gl.convert_layout(weight",
    ),
    "gate not clamped": ("gate = gl.minimum(gate, limit)", "gate = gl.minimum(gate, 1e9)"),
    "up not clamped below": ("up = gl.minimum(gl.maximum(up, -limit), limit)", "up = gl.minimum(up, limit)"),
    "alpha left out": ("x * (-ALPHA * LOG2_E)", "x * (-1.0 * LOG2_E)"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_notices_a_mistake(uneven, mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from npu_gptoss.moe.triton import many_hopper

    call = grouped_call(uneven, GROUPS)
    check(call, call.run(KERNEL))
    monkeypatch.setattr(many_hopper, "product", mutated(many_hopper, tmp_path, MUTATIONS[mutation]).product)
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check(call, call.run(KERNEL))
