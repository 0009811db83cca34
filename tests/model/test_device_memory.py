"""The decision to keep experts packed on Ascend, with the sizes of the published models and of real cards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from npu_gptoss.model.config import published_config
from npu_gptoss.model.device_memory import (
    GIB,
    RESERVE,
    Choice,
    Part,
    choose,
    hccl_bytes,
    kv_bytes,
    kv_bytes_per_token,
    room_bytes,
    weight_bytes,
)
from npu_gptoss.nominal import MEMORY

CONFIG = replace(published_config(36, experts=128), quantization="mxfp4")
SMALL = replace(published_config(), quantization="mxfp4")
NO_TRITON = "moe.experts.ascend_packed needs triton_ascend, which is not installed"


def of_120b(ranks: int, utilisation: float = 0.9, length: int = 16384, **how: str) -> Choice:
    return choose(CONFIG, Part.of(CONFIG, ranks), length, MEMORY["910B3"], utilisation, hccl=hccl_bytes(ranks), **how)


def test_bf16_is_not_given_up_where_it_fits():
    """The expansion costs time: packed is for models that do not fit."""
    assert [of_120b(ranks).packed for ranks in (2, 4, 8)] == [True, True, False]
    assert not of_120b(4, 0.95).packed  # as the tutorial serves it: 40 thousand tokens
    assert of_120b(4, 0.95, length=131072).packed  # of which one request would want more
    twenty = [choose(SMALL, Part.of(SMALL), 16384, MEMORY[card]).packed for card in ("910B3", "910B4")]
    assert twenty == [False, True]


@pytest.mark.parametrize(("wish", "packed"), [("packed", True), ("expanded", False)])
def test_the_variable_outvotes_the_arithmetic(wish, packed):
    for ranks in (2, 8):
        choice = of_120b(ranks, wish=wish)
        assert choice.packed == packed
        assert choice.fit == (choice.kept if packed else choice.expanded)


def test_without_the_kernel_a_hopeless_load_is_known_before():
    eight, two, four = (of_120b(ranks, objection=NO_TRITON) for ranks in (8, 2, 4))
    assert [choice.packed for choice in (eight, two, four)] == [False] * 3
    assert (eight.hopeless, two.hopeless, four.hopeless) == (False, True, True)
    assert not of_120b(4, 0.95, objection=NO_TRITON).hopeless
    for choice in (eight, two):
        assert NO_TRITON in choice.sentence()
    assert "108.8 GiB of weights" in two.sentence()


def test_windows_in_groups_of_their_own_halve_a_long_request():
    """As vLLM reckons: the window's blocks, the tokens in flight, and a block."""
    four, long, flying = Part.of(CONFIG, 4), 131072, 2 * 2048
    token = kv_bytes_per_token(CONFIG, four)
    assert kv_bytes(CONFIG, four, long) == long * token
    assert kv_bytes(CONFIG, four, long, flying) == (long + 128 * (-(-(127 + flying) // 128) + 1)) * token // 2
    assert kv_bytes(CONFIG, four, 128, flying) == (128 + 2 * 128) * token // 2
    # 120b in BF16 on four cards
    assert of_120b(4, 0.95, length=65536).packed
    assert not of_120b(4, 0.95, length=65536, in_flight=flying).packed
    assert of_120b(4, 0.95, length=65536, in_flight=flying).fit.tokens > 75_000


def test_rule_of_thumb_ends_no_start():
    """Between the certain need and the need with reserve, vLLM may try."""
    weights = weight_bytes(SMALL, Part.of(SMALL))
    fits = [
        choose(SMALL, Part.of(SMALL), 16384, weights + GIB + spare, 1.0, objection=NO_TRITON)
        for spare in (-GIB // 2, 0, RESERVE)
    ]
    assert [choice.hopeless for choice in fits] == [True, False, False]
    assert [choice.expanded.fits() for choice in fits] == [False, False, True]
    assert "is tight" in fits[1].sentence()


def test_buffer_of_one_layer_is_counted_with_packed_experts():
    one = Part.of(CONFIG)
    assert room_bytes(CONFIG, one) == 128 * 3 * 2880 * 2880 * 2
    choice = of_120b(2)
    half = Part.of(CONFIG, 2)
    assert choice.kept.weights == weight_bytes(CONFIG, half, packed=True) + room_bytes(CONFIG, half, packed=True)
    # of 36 layers each is 17 / 64 of its size in BF16, and one of them there as well
    matrices = 36 * room_bytes(CONFIG, half)
    assert choice.expanded.weights - choice.kept.weights == pytest.approx(matrices * (1 - 17 / 64 - 1 / 36), rel=1e-9)


def test_whole_groups_of_a_rank_are_counted_for_packed_experts():
    """2880 columns are 90 groups of 32: a quarter is 22.5 of them, and an eighth 11.25."""
    parts = [Part.of(CONFIG, ranks) for ranks in (1, 2, 4, 8)]
    assert [part.columns(CONFIG) for part in parts] == [2880, 1440, 720, 360]
    assert [part.columns(CONFIG, packed=True) for part in parts] == [2880, 1440, 736, 384]
    four = parts[2]
    assert room_bytes(CONFIG, four, packed=True) * 720 == room_bytes(CONFIG, four) * 736
    codes = 36 * 128 * 3 * 2880 * 736 * 17 // 32
    biases = 36 * 128 * 2 * 2 * (736 - 720)
    rest = weight_bytes(CONFIG, four) - 36 * room_bytes(CONFIG, four)
    assert weight_bytes(CONFIG, four, packed=True) == rest + codes + biases
    narrow = replace(CONFIG, intermediate_size=96)  # a rank in the middle touches a group more than the first
    assert Part.of(narrow, 4).columns(narrow, packed=True) == 64


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_experts_dealt_out_whole_take_as_much_as_cut_ones(ranks):
    part = Part.of(CONFIG, ranks)
    cut, whole = (weight_bytes(CONFIG, each) for each in (part, replace(part, parts=1, experts=128 // ranks)))
    biases_of_down = 36 * 2880 * 2 * (128 - 128 // ranks)
    assert cut - whole == biases_of_down


def test_a_stage_of_a_pipeline_is_not_reckoned_as_the_whole_model():
    """That would refuse a model that fits."""
    part = replace(Part.of(CONFIG, 2), layers=18, ends=1)
    halves = 2 * weight_bytes(CONFIG, part)
    assert halves == weight_bytes(CONFIG, Part.of(CONFIG, 2)) + 2 * 2880  # the last norm
