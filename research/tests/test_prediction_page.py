"""docs/performance.md's prediction is what its script computes, and the script computes what a hand does."""

from __future__ import annotations

import re

import pytest

from research.prediction_page import BY_HAND, CASES, PAGE, TABLES, counted, experts_of, predict, small_launches
from scripts.docs.page_tables import ROOT

TEXT = (ROOT / PAGE).read_text(encoding="utf-8")


def test_the_page_shows_the_prediction() -> None:
    assert TABLES.written(TEXT) == TEXT, "out of date: python research/prediction_page.py --write"


def test_one_request_is_what_a_hand_computes() -> None:
    """Hidden 2880, 24 layers, 64 + 2 x 8 heads of 64, 4 of 32 experts, a vocabulary of 201 088; two bytes a weight."""
    hidden, layers, keys = 2880, 24, 192
    attention = (hidden + 1) * (4096 + 2 * 512) + (4096 + 1) * hidden + 2 * hidden + 64
    expert = 3 * hidden * hidden + 3 * hidden
    weights = layers * (attention + (hidden + 1) * 32 + 4 * expert) + 201_088 * hidden
    seen = 12 * (keys + 128) * 2 * 512  # half of the layers see 128 keys
    row = predict(1, keys)
    assert row.gigabytes * 1e9 == pytest.approx(2 * (weights + seen), rel=1e-3)  # activations beside it
    assert row.bytes_ms == pytest.approx((row.gigabytes / 1.6, row.gigabytes / 1.2))
    assert row.launches_ms == pytest.approx((row.small_launches * 0.003, row.small_launches * 0.004))
    better, worse = row.tpot_ms
    assert better == pytest.approx(max(row.bytes_ms[0] + row.launches_ms[0], 24 * 0.25) + 1)
    assert worse == pytest.approx(max(row.bytes_ms[1] + row.launches_ms[1], 24 * 0.25) + 3)


@pytest.mark.parametrize(("requests", "keys"), CASES)
def test_it_overlaps_the_independent_estimate(requests: int, keys: int) -> None:
    better, worse = predict(requests, keys).tpot_ms
    least, most = (float(word) for word in re.findall(r"\d+", BY_HAND[requests]))
    assert better <= most
    assert least <= worse


def test_a_launch_more_in_the_traced_layer_is_24_more_in_the_prediction() -> None:
    """The trace is of two layers, so two launches more in its step."""
    row = re.search(r"^\| 10 \| ours, piecewise \| (\d+) \|", TEXT, re.M)
    more = TEXT.replace(row[0], row[0].replace(row[1], str(int(row[1]) + 2)))
    assert small_launches(more, 10) == small_launches(TEXT, 10) + 24
    with pytest.raises(ValueError, match="no row 10, ours, piecewise"):
        small_launches(TEXT.replace(row[0], ""), 10)


def test_ropes_gathers_are_counted_once() -> None:
    """A layer has two norms, QKV, O, the three of rope and the router's product outside attention and experts."""
    layer, attention, experts = (counted(TEXT, 1, part, "**ours**") for part in ("layer", "attention", "experts"))
    assert layer - attention - experts == 8


def test_the_experts_of_the_measured_time_give_that_time_back() -> None:
    for case, experts in zip((1, 0), experts_of(10, 192, 20.0), strict=True):
        assert predict(10, 192, experts).tpot_ms[case] == pytest.approx(20.0)
