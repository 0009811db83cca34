"""Every registered attention kernel that runs here, against the definition; and that the check notices mistakes."""

from __future__ import annotations

import pytest
import torch

from npu_gptoss.attention import paged_attention, small_ops, write_kv_cache
from npu_gptoss.kernels import current_platform, load_kernels
from npu_gptoss.kernels.registry import registry
from npu_gptoss.verify.mutations import mutations_of
from tests.attention.cases import BLOCK_SIZE, HEAD_DIM, KV_HEADS, STEPS, WINDOW, as_decode, check, make_step
from tests.refused import refused
from tests.tolerances import assert_close

load_kernels()
HERE = [
    k.name
    for k in registry.kernels.values()
    if (k.family, k.mode) == ("attention", "paged")
    and k.solution != "reference"
    and not k.capability.reasons_against(current_platform())
]


def test_there_is_a_kernel_to_test():
    assert "attention.paged.small_ops" in HERE


@pytest.mark.parametrize("kernel", HERE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sliding_window", [None, WINDOW, 1, 17])
@pytest.mark.parametrize("name", STEPS)
def test_kernel_equals_definition(kernel, dtype, sliding_window, name):
    step = make_step(STEPS[name], dtype, padding=3)
    check(lambda s, w: s.run(sliding_window=w, kernel=kernel), step, sliding_window)


@pytest.mark.parametrize("kernel", [*HERE, "reference"])
def test_window_keeps_128_keys_not_129(kernel):
    """A key planted 127 back is seen and one 128 back is not, in prefill, chunk and decode."""
    for rows in (300, 64, 1):
        for back, seen in ((127, True), (128, False)):
            step = make_step([(rows, 300)])
            step.query[:] = 0  # all visible keys weigh the same, only the planted value counts
            step.value_cache[:] = 0
            position = 299 - back
            block = step.metadata.block_table[0, position // BLOCK_SIZE]
            step.value_cache[block, position % BLOCK_SIZE] = 1000.0
            last = step.run(sliding_window=WINDOW, kernel=kernel)[-1]
            assert bool((last > 1).all()) is seen, f"{rows} rows, planted {back} back"
            assert bool((step.run(kernel=kernel)[-1] > 1).all()), "full attention sees it in any case"


@pytest.mark.parametrize("kernel", [*HERE, "reference"])
def test_padded_rows_with_nan_come_out_zero(kernel):
    step = make_step(STEPS["mixed, one without rows"], padding=5)
    out = torch.full_like(step.query, float("nan"))
    assert step.run(kernel=kernel, out=out) is out
    assert torch.isfinite(out).all()
    assert (out[-5:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutation", mutations_of("attention.paged"), ids=lambda mutation: mutation.name)
def test_the_check_bites(mutation, dtype):
    step = make_step(STEPS["chunks that cross the window"] + STEPS["decode at the window's edge"], dtype, padding=2)
    for window in (WINDOW, None):
        wrong = mutation.answer(step.inputs(window), lambda inputs: {"out": paged_attention(**inputs)})
        if wrong is not None:
            check(lambda s, w: s.run(sliding_window=w), step, window)
            with pytest.raises(AssertionError):
                check(lambda *_, out=wrong["out"]: out, step, window)
            return
    pytest.fail("neither a window layer nor a full one shows it")


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
    assert all(batch.pieces == 1 or batch.hidden.numel() <= 16 * 200 for batch in plan)


def test_the_scores_of_a_long_prompt_stay_below_128_mib():
    """Of the published 64 heads, in fp32."""
    step = make_step([(2000, 2000)])
    for before in (None, WINDOW - 1):
        plan = small_ops._plan(step.metadata, before, BLOCK_SIZE, step.query.device)
        assert sum(len(batch.rows) for batch in plan) == 2000
        assert max(batch.hidden.numel() for batch in plan) * 64 * 4 <= 128 << 20


@pytest.mark.parametrize("kernel", ["small_ops", "reference"])
def test_padding_rows_of_a_decode_step_come_out_zero(kernel):
    """Alone and among real rows; a length of 0 marks them, since a graph knows no other count."""
    step = as_decode(make_step([(1, 20), (1, 1), (1, 300)]), 320)
    nobodys = step.key_cache.shape[0] - 1
    assert bool(step.value_cache[nobodys].isnan().all())
    for padding in ([1], [0, 1, 2]):
        for row in padding:
            step.metadata.lengths[row] = 0
            step.metadata.block_table[row] = nobodys  # none of its entries may be read
            step.query[row] = float("nan")
        out = torch.full_like(step.query, float("nan"))
        step.run(kernel=kernel, out=out)
        assert bool((out[padding] == 0).all())
        assert bool(torch.isfinite(out).all())


def test_keys_are_padded_within_the_budget_in_any_order_of_requests(monkeypatch):
    monkeypatch.setattr(small_ops, "SCORES", 3200)
    step = make_step([(1, keys) for keys in (700, 600, 20, 30, 40, 50)])
    check(lambda s, w: s.run(sliding_window=w), step, None)
    plan = next(iter(step.metadata.plans.values()))
    assert all(batch.pieces == 1 or batch.hidden.numel() <= 3200 for batch in plan)


def test_index_tensors_are_built_once_per_step_and_window():
    step = make_step(STEPS["one token"])
    step.run()
    (first,) = step.metadata.plans.values()
    step.run()
    assert next(iter(step.metadata.plans.values())) is first
    step.run(sliding_window=WINDOW)
    assert len(step.metadata.plans) == 2


@pytest.mark.parametrize("kernel", ["small_ops", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_keys_and_values_land_in_their_slots_and_nowhere_else(kernel, dtype):
    step = make_step([(3, 20), (1, 33)], dtype)
    before = step.key_cache.clone(), step.value_cache.clone()
    key, value = (torch.randn(6, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
    write_kv_cache(key, value, step.key_cache, step.value_cache, step.metadata, kernel=kernel)
    slots = step.metadata.slot_mapping
    for new, cache, old in ((key, step.key_cache, before[0]), (value, step.value_cache, before[1])):
        flat, untouched = cache.view(-1, KV_HEADS, HEAD_DIM), torch.ones(cache.shape[0] * BLOCK_SIZE, dtype=torch.bool)
        assert torch.equal(flat[slots], new[:4])
        untouched[slots] = False
        assert_close(flat[untouched].nan_to_num(), old.view_as(flat)[untouched].nan_to_num())


def test_negative_slot_of_a_real_row_is_refused():
    step = make_step([(2, 2)])
    step.metadata.slot_mapping[1] = -1
    key = torch.zeros(2, KV_HEADS, HEAD_DIM)
    with refused("slot_mapping"):
        write_kv_cache(key, key, step.key_cache, step.value_cache, step.metadata)
