"""The check at a server's start, and its way out. tests/serving/emulated/test_defects.py has whole servers."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from ascend_emulator.ops import OPS

from npu_gptoss.attention import ascend
from npu_gptoss.errors import InputError
from npu_gptoss.serving.ascend import start_check
from npu_gptoss.verify.rank import Rank
from npu_gptoss.verify.self_test.attention import CASES, make_case
from tests import ascend_ops
from tests.refused import refused

CPU, BF16 = torch.device("cpu"), torch.bfloat16
WHOLE = Rank(CPU, BF16, 1, hidden=96, inner=64, experts=8, held=(0, 8), heads=16, kv_heads=2, short=True)
PART = replace(WHOLE, held=(2, 4))


def attention(rank):
    start_check.attention(rank.heads, rank.kv_heads, rank.dtype, rank.device)


@pytest.fixture(autouse=True)
def no_cache():
    """The checks run anew, and a workaround is undone afterwards."""
    yield
    for check in (start_check.attention, start_check.routed, start_check.around):
        check.cache_clear()
    ascend._heads_apart = False


def test_right_card_starts_without_a_log_line(caplog):
    with ascend_ops.ascend():
        attention(WHOLE)
        for rank in (WHOLE, PART):
            start_check.routed(rank)
            start_check.around(rank)
    assert not ascend.heads_kept_apart()
    assert caplog.records == []


def test_heads_that_are_merged_wrongly_are_kept_apart_from_the_start_on(caplog):
    with ascend_ops.ascend(defects=frozenset({"merged-heads"})):
        attention(WHOLE)
    assert ascend.heads_kept_apart()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_wrong_norms_end_the_start_without_another_kernel():
    with (
        ascend_ops.ascend(defects=frozenset({"narrow-norm"})),
        pytest.raises(InputError, match="projections or norms compute wrong") as refusal,
    ):
        start_check.around(WHOLE)
    assert "small_ops" not in str(refusal.value)


def test_the_check_has_the_sizes_of_this_rank(monkeypatch):
    monkeypatch.setattr(start_check, "expert_share", lambda config: (2, (4, 8)))
    hf = SimpleNamespace(hidden_size=96, intermediate_size=64, num_local_experts=16)
    model = SimpleNamespace(
        dtype=BF16, hf_config=hf, get_num_attention_heads=lambda parallel: 8, get_num_kv_heads=lambda parallel: 2
    )
    rank = start_check._rank(SimpleNamespace(model_config=model, parallel_config=None), CPU)
    assert rank == Rank(CPU, BF16, start_check.REPEATS, 96, 32, 16, (4, 8), 8, 2, short=True)


@pytest.mark.parametrize("device", ["npu:0", "npu:1"])
def test_no_check_of_the_card_is_passed_over_at_the_start(device, monkeypatch):
    asked = []
    for name in ("dispatch", "routed", "around", "tell_what_was_seen"):
        monkeypatch.setattr(start_check, name, lambda *given, name=name: asked.append(name))
    monkeypatch.setattr(start_check, "_rank", lambda config, device: WHOLE)
    monkeypatch.setattr(torch, "npu", SimpleNamespace(empty_cache=lambda: asked.append("freed")), raising=False)
    place = torch.device(device.replace("npu", "cuda"))  # torch_npu's name of a device is not known here
    start_check.rest("config", place)
    assert asked == ["dispatch", "routed", "around", "freed", *(["tell_what_was_seen"] if place.index == 0 else [])]


@pytest.mark.parametrize(
    ("check", "cann", "defect", "variable", "source"),
    [
        (attention, "8.5", "sink-per-part", "NPU_GPTOSS_KERNEL_ATTENTION_PAGED", "CANN 8.5"),
        (attention, "8.3.rc1", "window-race", "NPU_GPTOSS_KERNEL_ATTENTION_PAGED", "c36036e63"),
        (start_check.routed, "8.3.rc1", "stale-counts", "NPU_GPTOSS_KERNEL_MOE_EXPERTS", "87b1db69e"),
    ],
)
def test_defect_ends_the_start_and_small_ops_is_the_way_out(check, cann, defect, variable, source, monkeypatch):
    with ascend_ops.ascend(cann, defects=frozenset({defect})):
        if check is start_check.routed:
            check(WHOLE)  # of ranks with a part of the experts only
        with pytest.raises(InputError) as refusal:
            check(PART)
        assert source in str(refusal.value)
        assert f"{variable}=small_ops" in str(refusal.value)
        assert not ascend.heads_kept_apart()
        monkeypatch.setenv(variable, "small_ops")
        check(PART)


def test_wrong_routing_ends_the_start_and_names_small_ops(monkeypatch):
    name = "npu::npu_moe_gating_top_k_softmax"
    right = OPS[name]

    def flipped(*args, **kwargs):
        weights, ids, rows = right(*args, **kwargs)
        return weights, ids.flip(-1), rows

    monkeypatch.setitem(OPS, name, flipped)
    with (
        ascend_ops.ascend(),
        pytest.raises(InputError, match=r"routing computes wrong.*NPU_GPTOSS_KERNEL_MOE_ROUTE=small_ops"),
    ):
        start_check.routed(WHOLE)


@pytest.mark.parametrize(
    ("rows", "lengths", "window", "extra"),
    [
        ((1, 1), (40, 600), None, 2),
        ((1, 1), (40, 512), None, 0),  # one tile
        ((1, 1), (40, 600), 128, 0),  # a window lies in one tile
        ((1, 3), (40, 600), None, 0),  # nothing is merged
    ],
)
def test_two_rows_are_added_only_where_heads_are_merged_over_tiles(rows, lengths, window, extra):
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


def dispatching(tensor: int, data: int, experts: bool, seqs: int) -> SimpleNamespace:
    hf = SimpleNamespace(hidden_size=2880, num_local_experts=128, num_experts_per_tok=4)
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        scheduler_config=SimpleNamespace(max_num_seqs=seqs),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tensor, data_parallel_size=data, enable_expert_parallel=experts
        ),
    )


@pytest.mark.parametrize(
    ("card", "parallel", "seqs", "buffer", "field"),
    [
        ("Ascend910_9391", (8, 1, True), 256, "", ""),
        ("Ascend910_9391", (1, 8, True), 256, "", "HCCL_BUFFSIZE"),  # 396 MB
        ("Ascend910_9391", (1, 8, True), 256, "396", ""),
        ("Ascend910_9391", (1, 8, True), 256, "395", "HCCL_BUFFSIZE"),
        ("Ascend910_9391", (1, 1, True), 256, "", "--enable-expert-parallel"),
        ("Ascend910_9391", (1, 8, False), 256, "", ""),
        ("Ascend910B3", (1, 8, True), 256, "", ""),
    ],
)
def test_an_a3s_dispatch_needs_two_dies_and_its_buffer(card, parallel, seqs, buffer, field, monkeypatch):
    """Of gpt-oss-120b, as CANN's tiling counts."""
    monkeypatch.setattr(start_check, "name_of", lambda device: card)
    monkeypatch.setenv("HCCL_BUFFSIZE", buffer)
    with refused(field) if field else nullcontext():
        start_check.dispatch(dispatching(*parallel, seqs), None)


@pytest.mark.parametrize(("card", "told"), [("Ascend910_9391", True), ("Ascend910B3", False)])
def test_a_possible_hang_of_dispatch_beside_aiv_is_told_before_it(card, told, monkeypatch, caplog):
    monkeypatch.setattr(start_check, "name_of", lambda device: card)
    monkeypatch.setenv("HCCL_OP_EXPANSION_MODE", "AIV")
    start_check.dispatch(dispatching(8, 1, True, 16), None)
    assert ("HCCL_OP_EXPANSION_MODE=AIV" in caplog.text) is told
