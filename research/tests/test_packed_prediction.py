"""docs/performance.md's prediction of packed experts is what its script computes, and the script what a hand does."""

from __future__ import annotations

import re

import pytest

from npu_gptoss.doctor.memory import PUBLISHED_20B, PUBLISHED_120B
from npu_gptoss.model.device_memory import BF16, MXFP4
from research.packed_prediction import PAGE, TABLES, launches_of, layouts
from scripts.docs.page_tables import ROOT

TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def test_the_page_shows_the_prediction() -> None:
    assert TABLES.written(TEXT) == TEXT, "out of date: python research/packed_prediction.py --write"


def test_one_request_of_20b_is_what_a_hand_computes() -> None:
    """Four experts of 3 x 2880 x 2880 in 24 layers; some 20 instructions on each weight."""
    weights = 24 * 4 * 3 * 2880 * 2880
    plain, kept = layouts(PUBLISHED_20B, 1, 1)
    on_a_weight = 19 + (7 / 8 + 7 / 8 + 7 / 16) / 3
    expand = weights * on_a_weight / (40 * 1.8e9 * 128) * 1e3
    assert kept.expand_ms == pytest.approx((expand, 2 * expand))
    assert plain.read_ms == pytest.approx((weights * 2 / 1.6e9, weights * 2 / 1.2e9))
    from_l2 = weights * 2 / (20 * 110 * 1.8e9) * 1e3  # 4 x 2880 x 5760 x 2 bytes are 133 MB
    assert kept.room_ms == pytest.approx((from_l2, plain.read_ms[1]))
    more = expand + from_l2 - plain.read_ms[0] + 24 * 4 * 0.003
    assert kept.tpot_ms[0] - plain.tpot_ms[0] == pytest.approx(more)


def test_the_bytes_are_those_that_were_counted() -> None:
    """The trace table's weights, biases and activations, less those of BF16: one is read packed and written."""
    row = r"^\| 1 \| experts \| {} \| .* \| ([\d.]+) \|$"
    plain, packed = (float(re.search(row.format(way), TEXT, re.M)[1]) for way in ("BF16", "MXFP4, packed"))
    assert packed - plain == pytest.approx(MXFP4 + BF16, abs=0.011)


def test_packing_launches_more_in_each_layer() -> None:
    """Six operators, of which two stream the weights."""
    for config in (PUBLISHED_20B, PUBLISHED_120B):
        assert launches_of(config, 8, True) - launches_of(config, 8, False) == 4 * config.num_hidden_layers


def test_the_l2_holds_no_room_of_many_experts() -> None:
    assert layouts(PUBLISHED_20B, 1, 1)[1].room_fits
    assert not layouts(PUBLISHED_20B, 1, 8)[1].room_fits


@pytest.mark.parametrize(("cards", "columns"), [(2, 1440), (4, 736), (8, 384)])
def test_a_card_expands_whole_groups_of_columns(cards: int, columns: int) -> None:
    """2880 / 4 and / 8 are no multiples of the 32 weights that share a scale."""
    plain, kept = layouts(PUBLISHED_120B, cards, 8)
    assert (plain.columns, kept.columns) == (2880 // cards, columns)
    assert kept.weights / plain.weights == columns / plain.columns
