"""Each known defect of CANN's attention fails its own call, and right kernels pass all calls."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.attention import ascend
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import platform_override
from npu_gptoss.serving.ascend import start_check
from npu_gptoss.verify.depth import Rank
from npu_gptoss.verify.self_test.attention import CASES, results_of
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
QUICK = [case for case in CASES if sum(case.rows) < 700]


def wrong(case, heads=8, kv_heads=1):
    return [result for result in found(case, heads, kv_heads) if result.wrong]


def found(case, heads=8, kv_heads=1):
    return list(results_of(case, Rank(CPU, BF16, 2, heads=heads, kv_heads=kv_heads)))


@pytest.fixture
def start():
    """The start check without its cache; its workaround is undone afterwards."""
    start_check.attention.cache_clear()
    yield lambda: start_check.attention(16, 2, BF16, CPU)
    start_check.attention.cache_clear()
    ascend._heads_apart = False


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_right_kernels_pass_with_room_to_spare(case):
    with platform_override("cpu"):
        assert max(result.error for result in found(case)) < 0.5
        assert wrong(case) == []


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


def test_right_card_starts_without_a_log_line(start, caplog):
    with ascend_ops.ascend():
        start()
    assert not ascend.heads_kept_apart()
    assert caplog.records == []


def test_merged_heads_are_worked_around_and_named_once(start, caplog):
    with ascend_ops.ascend(defects=frozenset({"merged-heads"})):
        start()
        start()
    assert ascend.heads_kept_apart()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4251efa76" in caplog.text


@pytest.mark.parametrize(("defect", "cann"), [("sink-per-part", "8.5"), ("window-race", "8.3.rc1")])
def test_defect_without_a_workaround_ends_the_start_and_names_small_ops(start, defect, cann):
    with (
        ascend_ops.ascend(cann, defects=frozenset({defect})),
        pytest.raises(InputError, match="NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops"),
    ):
        start()
    assert not ascend.heads_kept_apart()


def test_small_ops_starts_on_a_defective_card(start, monkeypatch):
    monkeypatch.setenv("NPU_GPTOSS_KERNEL_ATTENTION_PAGED", "small_ops")
    with ascend_ops.ascend(defects=frozenset({"window-race"})):
        start()


@pytest.mark.parametrize(
    ("rows", "lengths", "window", "extra"),
    [
        ((1, 1), (40, 600), None, 2),
        ((1, 1), (40, 512), None, 0),  # one tile
        ((1, 1), (40, 600), 128, 0),  # a window lies in one tile
        ((1, 3), (40, 600), None, 0),  # nothing is merged
    ],
)
def test_two_rows_are_added_only_where_heads_are_merged_over_tiles(start, rows, lengths, window, extra):
    from dataclasses import replace

    from npu_gptoss.verify.self_test.attention import make_case

    ascend.keep_heads_apart()
    step = make_case(replace(CASES[0], rows=rows, lengths=lengths), 8, 1, BF16)
    with ascend_ops.ascend() as calls:
        placed = step.written(CPU)
        calls.clear()
        got = placed.attend(window)
    ((_, call),) = [one for one in calls if one[0] == "npu_fused_infer_attention_score_v2.out"]
    assert len(call["query"]) == sum(rows) + extra
    assert call["actual_seq_kvlen"] == [*lengths, *([2] if extra else [])]
    assert torch.allclose(got.float(), step.want(window), atol=0.05)
