"""Each known defect of CANN's attention is seen by the call that is there for it, and right kernels pass them all."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.attention import ascend
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import platform_override
from npu_gptoss.selftest.attention import CASES, LIMIT, outcomes
from npu_gptoss.serving.ascend import start_check
from tests import ascend_ops

CPU, BF16 = torch.device("cpu"), torch.bfloat16
QUICK = [case for case in CASES if sum(case.rows) < 700]


def wrong(case, heads=8, kv_heads=1):
    found = outcomes(case, CPU, heads=heads, kv_heads=kv_heads, dtype=BF16, repeats=2)
    return [outcome for outcome in found if outcome.problem]


@pytest.fixture
def start():
    """The start check on fresh ground; the way round is taken back afterwards."""
    start_check.attention.cache_clear()
    yield lambda: start_check.attention(16, 2, BF16, CPU)
    start_check.attention.cache_clear()
    ascend._heads_apart = False


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_right_kernels_pass_with_room_to_spare(case):
    with platform_override("cpu"):
        assert max(o.deviation for o in outcomes(case, CPU, heads=8, kv_heads=1, dtype=BF16, repeats=2)) < LIMIT / 2
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
def test_each_defect_is_seen_by_its_call_and_by_no_other(defect, cann, seen_by):
    """Merged heads have a pattern, or the log would name them as the defect where another is, and go round it."""
    with ascend_ops.ascend(cann, defects=frozenset({defect})):
        found = {
            (case.name, outcome.merged_heads)
            for groups in (1, 2)
            for case in QUICK
            for outcome in wrong(case, heads=8 * groups, kv_heads=groups)
        }
    assert {name for name, _ in found} == seen_by
    if defect != "window-race":
        assert {merged_heads for _, merged_heads in found} == {defect == "merged-heads"}


@pytest.mark.parametrize("cann", ["8.3.rc1", "8.5", "9.0", "9.1"])
def test_right_operators_pass(cann):
    with ascend_ops.ascend(cann):
        assert [case.name for case in QUICK if wrong(case)] == []


def test_rows_behind_the_last_request_that_are_written_are_seen(monkeypatch):
    from npu_gptoss import attention

    monkeypatch.setattr(attention, "zero_tail", lambda out, tokens: out)
    (case,) = [case for case in CASES if case.padding]
    with ascend_ops.ascend():
        assert [outcome.problem for outcome in wrong(case)] == [
            "rows behind the last request came out other than zero"
        ] * 2


def test_a_right_card_starts_without_a_word(start, caplog):
    with ascend_ops.ascend():
        start()
    assert not ascend.heads_kept_apart()
    assert caplog.records == []


def test_merged_heads_are_gone_round_and_named_once(start, caplog):
    with ascend_ops.ascend(defects=frozenset({"merged-heads"})):
        start()
        start()
    assert ascend.heads_kept_apart()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4251efa76" in caplog.text


@pytest.mark.parametrize(("defect", "cann"), [("sink-per-part", "8.5"), ("window-race", "8.3.rc1")])
def test_what_has_no_way_round_is_refused_and_the_way_out_is_named(start, defect, cann):
    with (
        ascend_ops.ascend(cann, defects=frozenset({defect})),
        pytest.raises(InputError, match="NPU_GPTOSS_KERNEL_ATTENTION_PAGED=small_ops"),
    ):
        start()
    assert not ascend.heads_kept_apart()


def test_the_way_out_starts(start, monkeypatch):
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
def test_two_rows_are_added_only_where_heads_would_be_merged_over_tiles(start, rows, lengths, window, extra):
    from dataclasses import replace

    from npu_gptoss.selftest.attention import make_case

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
