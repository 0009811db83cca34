"""Each known defect of CANN's attention fails its own call, and right kernels pass all calls."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.attention import CASES, results_of
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
QUICK = [case for case in CASES if sum(case.rows) < 700]


def wrong(case, heads=8, kv_heads=1):
    return [result for result in found(case, heads, kv_heads) if result.wrong]


def found(case, heads=8, kv_heads=1):
    return list(results_of(case, Rank(CPU, BF16, 2, heads=heads, kv_heads=kv_heads)))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in QUICK], ids=lambda case: case.name)
def test_right_kernels_pass_the_long_calls(case):
    with ascend_ops.ascend():
        assert wrong(case) == []


@pytest.mark.parametrize(
    ("defect", "cann", "seen_by"),
    [
        ("merged-heads", "8.3.rc1", {"decode over tiles", "one long request", "many equal lengths"}),
        ("sink-per-part", "8.5", {"one long request"}),
        ("hidden-first-tile", "8.3.rc1", {"a chunk beside decodes"}),
        ("window-race", "8.5", {"windows at tile borders", "a chunk beside decodes", "rows behind the last request"}),
    ],
)
def test_each_defect_fails_its_own_calls_only(defect, cann, seen_by):
    """Only merged heads have their pattern, or a server would work around another defect as if it were this one."""
    with ascend_ops.ascend(cann, defects=frozenset({defect})):
        failed = {
            (case.name, result.merged_heads)
            for groups in (1, 2)
            for case in QUICK
            for result in wrong(case, heads=8 * groups, kv_heads=groups)
        }
    assert {name for name, _ in failed} == seen_by
    if defect != "window-race":
        assert {merged_heads for _, merged_heads in failed} == {defect == "merged-heads"}


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5", "9.0", "9.1"])
def test_right_operators_pass(cann):
    with ascend_ops.ascend(cann):
        assert [case.name for case in QUICK if wrong(case)] == []


def test_written_rows_after_the_last_request_fail(monkeypatch):
    from npu_gptoss import attention

    monkeypatch.setattr(attention, "zero_tail", lambda out, tokens: out)
    (case,) = [case for case in CASES if case.padding]
    with ascend_ops.ascend():
        words = [result.lines for result in wrong(case)]
    assert len(words) == 2
    assert all("padding[" in str(lines) for lines in words), words
