"""The Gluon kernel of a single token's experts against the definition: edges of units, rings and shares; mutations.

Needs a GPU of compute capability 9.0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import Mxfp4Experts
from tests.attention.triton_run import mutated
from tests.moe.test_triton import PATHS, check, make_call, make_experts, slices
from tests.tolerances import assert_close

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

ONE = PATHS["one"]


@pytest.fixture(autouse=True)
def gluon_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The Triton kernels of the same path cannot be called. New memory is NaN."""
    from npu_gptoss.kernels.triton_launch import has_hopper
    from npu_gptoss.moe.triton import launches

    if not has_hopper(0):
        pytest.skip("the Gluon kernel needs a GPU of compute capability 9.0 and a Triton release that it was seen with")
    monkeypatch.setattr(launches.few, "gate_up", None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with platform_override("cuda", frozenset({"triton"})):
        yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def published() -> Mxfp4Experts:
    """Codes and scales drawn as such: to compress floats of this size takes longer than all tests."""
    generator = torch.Generator("cuda").manual_seed(1)

    def matrix(rows: int, exponent: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (32, rows, 2880 // 32)
        blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, device="cuda", generator=generator)
        return blocks, torch.randint(
            exponent, exponent + 4, shape, dtype=torch.uint8, device="cuda", generator=generator
        )

    def bias(rows: int) -> torch.Tensor:
        return (torch.randn(32, rows, device="cuda", generator=generator) * 4).to(torch.bfloat16)

    return Mxfp4Experts(*matrix(5760, 120), bias(5760), *matrix(2880, 118), bias(2880))


@pytest.fixture(scope="module")
def uneven() -> Mxfp4Experts:
    """Fewer units than groups, rows that fill no tile, inputs that fill neither a tile nor a stage."""
    return make_experts("mxfp4", experts=8, hidden=96, inner=1120)


def counters() -> list[int]:
    from npu_gptoss.moe.triton import one_hopper

    return one_hopper._counters(torch.device("cuda", torch.cuda.current_device())).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_a_token_at_the_published_sizes_and_the_counters_are_zeros_again(published, seed):
    call = make_call(published, 1, seed=seed)
    check(call, call.run(ONE))
    assert counters() == [0, 0]


@pytest.mark.parametrize(("hidden", "inner"), [(64, 96), (96, 1120), (1056, 64), (2880, 1440), (2880, 352)])
def test_sizes_that_fill_no_stage_tile_or_unit(hidden, inner):
    call = make_call(make_experts("mxfp4", experts=5, hidden=hidden, inner=inner), 1)
    check(call, call.run(ONE))


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
def test_any_number_of_slots(uneven, top_k):
    call = make_call(uneven, 1, top_k=top_k)
    check(call, call.run(ONE))


def test_experts_of_other_ranks_and_padding_are_skipped_and_never_multiplied(published):
    share = slices(published, 8, 20)
    call = make_call(share, 1, experts=32)
    call.topk_ids[0] = torch.tensor([19, 3, -1, 8], device="cuda")
    check(call, call.run(ONE))


def test_a_rank_to_which_no_token_comes_gives_zero(published):
    call = make_call(slices(published, 8, 20), 1, experts=32)
    call.topk_ids[0] = torch.arange(4, device="cuda")
    assert bool((call.run(ONE) == 0).all())
    assert counters() == [0, 0]


def test_experts_beyond_a_warps_lanes():
    call = make_call(make_experts("mxfp4", experts=130, hidden=64, inner=64), 1)
    call.topk_ids[0] = torch.tensor([129, 0, 64, 33], device="cuda")
    check(call, call.run(ONE))


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**20])
def test_tiny_and_huge_inputs_keep_their_digits(published, factor):
    """Products of opened weights are tiny; inputs are brought up to meet them. Biases would hide what is lost."""
    weights = dataclasses.replace(
        published,
        gate_up_proj_bias=torch.zeros_like(published.gate_up_proj_bias),
        down_proj_bias=torch.zeros_like(published.down_proj_bias),
    )
    call = make_call(weights, 1)
    call.hidden *= factor
    check(call, call.run(ONE))


def test_the_same_call_gives_the_same_bits(published):
    call = make_call(published, 1)
    first = call.run(ONE)
    assert all(torch.equal(first, call.run(ONE)) for _ in range(20))


def test_without_it_the_triton_kernels_compute_the_same(published, monkeypatch: pytest.MonkeyPatch):
    from npu_gptoss.moe.triton import launches

    call = make_call(published, 1)
    got = call.run(ONE)
    monkeypatch.undo()
    monkeypatch.setattr(launches, "has_hopper", lambda device: False)
    with platform_override("cuda", frozenset({"triton"})):
        plain = call.run(ONE)
    check(call, plain)
    assert_close(got, plain, atol=2**-7 * plain.float().abs().max().item())


def test_what_it_cannot_take_goes_to_the_triton_kernels():
    """Inputs longer than a ring would make groups wait for each other for ever."""
    from npu_gptoss.moe.triton import one_hopper
    from npu_gptoss.moe.triton.layout import prepare

    sized = {hidden: prepare(make_experts("mxfp4", 1, hidden, 64), 7.0) for hidden in (4096, 4160)}
    assert one_hopper.takes(sized[4096], 32)
    assert not one_hopper.takes(sized[4096], 33)
    assert not one_hopper.takes(sized[4160], 4)
    assert not one_hopper.takes(prepare(make_experts("bfloat16", 1, 64, 64), 7.0), 4)
    call = make_call(make_experts("mxfp4", 4, 4160, 64), 1)
    with pytest.raises(TypeError, match="NoneType"):  # the Triton kernel, which the fixture took away
        call.run(ONE)


MUTATIONS: dict[str, tuple[str, str]] = {
    "bias dropped": ("* SMALL + gl.expand_dims(add.to(gl.float32), 1)", "* SMALL"),
    "bias of the first expert": ("bias + mine * R + row", "bias + row"),
    "scale of the other half": ("fields << 23", "fields << 15"),
    "scale of the next tile": ("even, odd = gl.split", "odd, even = gl.split"),
    "inputs of the first slot for all": ("x if UP else x + which * K", "x"),
    "inputs of the first stage for all": ("x_tiles.index(step * EACH + 3)", "x_tiles.index(3)"),
    "inputs not brought up": ("(x.to(gl.float32) * LARGE)", "x"),
    "weights of the first rows of a tile": ("part * (ROWS // 4), 0]", "0, 0]"),
    "weights of the first expert": ("row = mine * KEPT", "row = 0 * KEPT"),
    "the largest of the warps' sums": ("y = gl.sum(y, 0)", "y = gl.max(y, 0)"),
    "routing weight dropped": ("y * weight, mask", "y, mask"),
    "gate not clamped": ("gate = gl.minimum(gate, limit)", "gate = gl.minimum(gate, 1e9)"),
    "up not clamped below": ("up = gl.minimum(gl.maximum(up, -limit), limit)", "up = gl.minimum(up, limit)"),
    "one added to up left out": ("(up + 1) * gate", "up * gate"),
    "the third codes of a pair": ("shf.l.wrap.b32 t, $4, $4, 10", "shl.b32 t, $4, 10"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_the_check_notices_a_mistake(published, mutation, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from npu_gptoss.moe.triton import one_hopper

    call = make_call(published, 1)
    check(call, call.run(ONE))
    module = mutated(one_hopper, tmp_path, MUTATIONS[mutation])
    monkeypatch.setattr(one_hopper, "experts_kernel", module.experts_kernel)
    with pytest.raises(AssertionError, match=r"differ|not finite"):
        check(call, call.run(ONE))
