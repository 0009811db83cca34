"""A decode batch's Gluon kernels for Hopper against the definition: edges of columns, steps and rows; mutations. Needs
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
from tests.moe.hopper import ON_HOPPER, grouped_call, with_tiles
from tests.moe.test_triton import check, make_call, make_experts, slices

pytestmark = ON_HOPPER
KERNEL = "moe.experts.gluon_few"

# Slots of each expert: none, one, around half a product's columns, all of them, and more than once all
GROUPS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17)
# beside the shapes that are used: fewer rows than the layout's tiles, two slots at once, a loop that ends in its middle
OTHER = tuned.FewTiles(slots=2, rows=32, warps=1, deep=3, registers=168)
USED = {f"{shape.slots}slots_{shape.deep}deep": shape for _, shape in tuned.FEW}


@pytest.fixture(autouse=True, params=[*USED.values(), OTHER], ids=[*USED, "other"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with with_tiles(monkeypatch, "few_gluon_tiles", lambda tokens: request.param):
        yield


@pytest.fixture(scope="module")
def uneven() -> Mxfp4Experts:
    """Rows that fill no tile, inputs that fill neither a step nor what is staged at once."""
    return make_experts("mxfp4", experts=len(GROUPS), hidden=1120, inner=800)


def test_groups_that_end_at_every_edge_of_the_columns(uneven):
    call = grouped_call(uneven, GROUPS)
    check(call, call.run(KERNEL))


@pytest.mark.parametrize(
    ("hidden", "inner"), [(32, 32), (96, 160), (256, 64), (288, 544), (2880, 1440), (2880, 2880), (6144, 3072)]
)
def test_any_rows_and_inputs(hidden, inner):
    call = make_call(make_experts("mxfp4", experts=8, hidden=hidden, inner=inner), 7)
    check(call, call.run(KERNEL))


@pytest.mark.parametrize("tokens", [1, 2, 8, 48, 129])
def test_any_batch(uneven, tokens):
    call = make_call(uneven, tokens)
    check(call, call.run(KERNEL))


def test_the_published_shape_with_every_expert_of_120b():
    call = make_call(make_experts("mxfp4", experts=128, hidden=2880, inner=2880), 60)
    check(call, call.run(KERNEL))


def test_experts_of_other_ranks_and_padding_are_skipped_and_never_multiplied(uneven):
    call = make_call(slices(uneven, 2, 6), 11, experts=len(GROUPS))
    call.topk_ids[3] = -1
    call.topk_weights[3] = 0
    call.hidden[3] = float("nan")
    got = call.run(KERNEL)
    check(call, got)
    assert bool((got[3] == 0).all())


def test_a_rank_to_which_no_token_comes_gives_zero(uneven):
    call = make_call(slices(uneven, 6, 11), 5, experts=len(GROUPS))
    call.topk_ids[:] = torch.arange(4, device="cuda")
    assert bool((call.run(KERNEL) == 0).all())


@pytest.mark.parametrize("exponent", [-60, -20, 20])
def test_small_and_large_inputs_are_not_lost_in_the_products(uneven, exponent):
    """The weights are opened as denormals; without biases and clamp, what comes out is as small or large."""
    none = {"gate_up_proj_bias": uneven.gate_up_proj_bias * 0, "down_proj_bias": uneven.down_proj_bias * 0}
    call = make_call(dataclasses.replace(uneven, **none), 9)
    call.hidden *= 2.0**exponent
    call.limit = 1e30
    check(call, call.run(KERNEL))


def test_the_same_call_gives_the_same_bits(uneven):
    call = make_call(uneven, 30)
    want = call.run(KERNEL)
    assert all(torch.equal(call.run(KERNEL), want) for _ in range(20))


def test_the_second_projection_asks_for_its_weights_before_it_waits():
    from npu_gptoss.moe.triton import few_hopper, launches

    call = make_call(make_experts("mxfp4", hidden=2880, inner=2880), 8)
    few_hopper.down.device_caches.clear()
    call.run(KERNEL)
    ((kernels, *_),) = few_hopper.down.device_caches.values()
    (compiled,) = kernels.values()
    before, _, after = compiled.asm["ptx"].partition("griddepcontrol.wait")
    shape = launches.few_gluon_tiles(8)
    # a step: two tiles, of 16 rows of each warp two
    assert before.count("ld.global.v2.b32") == shape.deep * 2 * 2 * (shape.rows // (16 * shape.warps))
    assert "ld.global.v2.b32" in after  # the inputs


MUTATIONS: dict[str, tuple[str, str]] = {
    "exponents of the next group": ("fields << (23 - 8 * (tile * 2 + half))", "fields << (15 - 8 * (tile + half))"),
    "the last exponent is the first": ("field = fields >> 1", "field = fields << 23"),
    "exponents of the first step for all": ("scale + step * ROWS", "scale"),
    "exponents of the first rows for all": ("* (STEPS * ROWS) + inside + (i", "* (STEPS * ROWS) + (i"),
    "weights of the first step for all": ("w = word + step * (2 * ROWS * WORDS)", "w = word"),
    "weights of the first tile for both": ("gl.load(w + ROWS * WORDS,", "gl.load(w,"),
    "weights of the first rows for all": ("inside * WORDS", "0 * inside"),
    "weights of the first expert": ("expert * KEPT", "0 * KEPT"),
    "the steps before once more": ("first + DEEP + at", "first + at"),
    "inputs of the first step for all": ("x_groups, first + at", "x_groups, at"),
    "inputs of the other group": ("step * 4 + tile * 2 + half", "step * 4 + tile * 2 + 1 - half"),
    "inputs of the other tile": ("step * 4 + tile * 2 + half", "step * 4 + 2 - tile * 2 + half"),
    "inputs of the other codes": ("one, other = right(", "other, one = right("),
    "inputs of the first token for all": ("(slot // PER_ROW)", "(slot * 0)"),
    "inputs of the first two slots for all": ("n = begin + gl.expand_dims", "n = 0 * begin + gl.expand_dims"),
    "the first columns for all": ("lists + expert * slots + done + n", "lists + expert * slots + n"),
    "the last slot lost": ("(done + n < count)", "(done + n < count - 1)"),
    "columns beyond the first lost": ("real = (n < SLOTS) &", "real = (done == 0) & (n < SLOTS) &"),
    "bias of the first expert": ("bias + expert * R + m", "bias + m"),
    "routing weight dropped": ("sums *= gl.expand_dims(gl.load(topk", "sums += 0 * gl.expand_dims(gl.load(topk"),
    "gate not clamped": (
        "gate = gl.minimum(gate.reshape([BM // 2, COLUMNS]), limit)",
        "gate = gate.reshape([BM // 2, COLUMNS])",
    ),
    "up not clamped below": (
        "gl.minimum(gl.maximum(up.reshape([BM // 2, COLUMNS]), -limit), limit)",
        "gl.minimum(up.reshape([BM // 2, COLUMNS]), limit)",
    ),
    "alpha left out": ("gate * -ALPHA", "gate * -1.0"),
}  # fmt: skip


@pytest.mark.parametrize("tiles", [OTHER], ids=["other"], indirect=True)
@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_notices_a_mistake(uneven, mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from npu_gptoss.moe.triton import few_hopper

    call = grouped_call(uneven, GROUPS)
    check(call, call.run(KERNEL))
    wrong = mutated(few_hopper, tmp_path, MUTATIONS[mutation])
    monkeypatch.setattr(few_hopper, "gate_up", wrong.gate_up)
    monkeypatch.setattr(few_hopper, "down", wrong.down)
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check(call, call.run(KERNEL))
