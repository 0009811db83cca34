"""Equality within tolerances, and the lines of a difference."""

from __future__ import annotations

from math import inf

import pytest
import torch

from npu_gptoss.verify.compare import compare
from npu_gptoss.verify.tolerances import BFLOAT16, EXACT, FLOAT32, Tolerance

WANT = torch.tensor([[1.0, 2.0], [3.0, 4.0]])


def with_change(at: tuple[int, int], value: float) -> torch.Tensor:
    got = WANT.clone()
    got[at] = value
    return got


def test_errors_are_in_units_of_the_tolerance_and_the_worst_comes_first() -> None:
    got = with_change((1, 0), 3.0 + 2 * (1e-5 + 1.3e-6 * 3))
    got[0, 1] = 2.5
    verdict = compare({"out": got}, {"out": WANT}, {"out": FLOAT32})
    assert (verdict.wrong, verdict.elements, verdict.ok) == (2, 4, False)
    first, second = verdict.worst[:2]
    assert (first.index, first.got, first.expected) == ((0, 1), 2.5, 2.0)
    assert second.index == (1, 0)
    assert second.error == pytest.approx(2.0, rel=0.02)
    assert "2 of 4 values differ" in verdict.lines()[0]
    assert "out[0, 1]: got 2.5, expected 2" in verdict.lines()[1]


@pytest.mark.parametrize("value", [float("nan"), inf, -inf])
@pytest.mark.parametrize("limit", [FLOAT32, BFLOAT16, Tolerance(1e9, 1e9), EXACT])
def test_nan_and_inf_fail_at_any_tolerance(value: float, limit: Tolerance) -> None:
    verdict = compare({"out": with_change((1, 1), value)}, {"out": WANT}, {"out": limit})
    assert verdict.wrong == 1
    assert verdict.error == inf


def test_a_moved_value_may_be_nan_and_no_bit_of_it_may_change() -> None:
    want = with_change((0, 0), float("nan"))
    assert compare({"out": want.clone()}, {"out": want}, {"out": EXACT}).ok
    off = torch.nextafter(want, torch.tensor(inf))
    assert compare({"out": off}, {"out": want}, {"out": EXACT}).wrong == 3


def test_integers_have_no_tolerance() -> None:
    verdict = compare({"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([1, 3])}, {"ids": BFLOAT16})
    assert verdict.wrong == 1


@pytest.mark.parametrize("got", [{"out": WANT[0]}, {"other": WANT}, {}])
def test_other_shapes_and_names_are_an_objection(got: dict[str, torch.Tensor]) -> None:
    verdict = compare(got, {"out": WANT}, {"out": FLOAT32})
    assert not verdict.ok
    assert verdict.error == inf
    assert "expected" in verdict.lines()[0]


def test_shares_of_the_largest_and_of_sizes_widen_a_tolerance() -> None:
    got, sizes = with_change((0, 0), 1.3), {"out": torch.tensor([[8.0, 0.0], [0.0, 0.0]])}
    for limit in (Tolerance(0.0, 0.0, of_largest=0.1), Tolerance(1e-9, 0.0, of_size=0.05)):
        assert compare({"out": got}, {"out": WANT}, {"out": limit}, sizes).ok
        assert not compare({"out": with_change((0, 0), 1.5)}, {"out": WANT}, {"out": limit}, sizes).ok
