"""How the portable kernel of attention cuts its work. tests/verify/test_mistakes.py compares its results."""

from __future__ import annotations

import torch

from npu_gptoss.attention import small_ops, write_kv_cache
from npu_gptoss.verify.attention_cases import STEPS, WINDOW
from tests.attention.cases import BLOCK_SIZE, HEAD_DIM, KV_HEADS, check, make_step
from tests.refused import refused


def test_long_prompts_are_cut_into_pieces_of_bounded_size(monkeypatch):
    monkeypatch.setattr(small_ops, "ROWS", 16)
    monkeypatch.setattr(small_ops, "SCORES", 16 * 200)
    step = make_step([(300, 300), (1, 700), (1, 20), (40, 333)])
    for sliding_window in (None, WINDOW):
        check(lambda s, w: s.run(sliding_window=w), step, sliding_window)
        step.metadata.plans.clear()
    step.run(sliding_window=WINDOW)
    (plan,) = step.metadata.plans.values()
    assert all(batch.hidden.shape[1] <= 16 for batch in plan)
    assert all(batch.hidden.shape[2] <= WINDOW - 1 + 16 for batch in plan), "a window layer reads its window only"
    assert all(len(batch.hidden) == 1 or batch.hidden.numel() <= 16 * 200 for batch in plan)


def test_the_scores_of_a_long_prompt_stay_below_128_mib():
    """Of the published 64 heads, in fp32."""
    step = make_step([(2000, 2000)])
    for before in (None, WINDOW - 1):
        plan = small_ops._plan(step.metadata, before, BLOCK_SIZE, step.query.device)
        assert sum(len(batch.rows) for batch in plan) == 2000
        assert max(batch.hidden.numel() for batch in plan) * 64 * 4 <= 128 << 20


def test_keys_are_padded_within_the_budget_in_any_order_of_requests(monkeypatch):
    monkeypatch.setattr(small_ops, "SCORES", 3200)
    step = make_step([(1, keys) for keys in (700, 600, 20, 30, 40, 50)])
    check(lambda s, w: s.run(sliding_window=w), step, None)
    plan = next(iter(step.metadata.plans.values()))
    assert all(len(batch.hidden) == 1 or batch.hidden.numel() <= 3200 for batch in plan)


def test_index_tensors_are_built_once_per_step_and_window():
    step = make_step(STEPS["one token"])
    step.run()
    (first,) = step.metadata.plans.values()
    step.run()
    assert next(iter(step.metadata.plans.values())) is first
    step.run(sliding_window=WINDOW)
    assert len(step.metadata.plans) == 2


def test_negative_slot_of_a_real_row_is_refused():
    step = make_step([(2, 2)])
    step.metadata.slot_mapping[1] = -1
    key = torch.zeros(2, KV_HEADS, HEAD_DIM)
    with refused("slot_mapping"):
        write_kv_cache(key, key, step.key_cache, step.value_cache, step.metadata)
