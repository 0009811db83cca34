"""The fused attention call on the emulated operators: against the definition, and when it is called wrongly.

The operators check the contract of CANN in strict mode, so a test that passes also says that none of it is broken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from ascend_emulator.rules import ContractError

from npu_gptoss.attention import AttentionMetadata, ascend, write_kv_cache
from npu_gptoss.kernels import KernelError
from npu_gptoss.verify.attention_cases import STEPS, WINDOW, Shape
from tests import ascend_ops
from tests.attention import cases
from tests.attention.cases import make_step
from tests.tolerances import assert_close

BF16 = torch.bfloat16
FIA = "npu_fused_infer_attention_score_v2.out"


@pytest.fixture(autouse=True)
def block_size_of_the_device(monkeypatch):
    monkeypatch.setattr(cases, "BLOCK_SIZE", 128)


@pytest.fixture
def calls():
    with ascend_ops.ascend() as calls:
        yield calls


def fused(step, window):
    return step.run(sliding_window=window, kernel="ascend")


def check(run, step, sliding_window):
    """The definition, but for the probabilities, which the operator rounds to bf16 before they meet the values."""
    want = step.run(sliding_window=sliding_window, kernel="reference")
    assert_close(run(step, sliding_window), want, atol=2**-8)


@pytest.mark.parametrize("cann", ["8.5", "9.0", "9.1"])
@pytest.mark.parametrize("sliding_window", [None, WINDOW, 1, 17])
@pytest.mark.parametrize("name", STEPS)
def test_the_fused_call_equals_the_definition(name, sliding_window, cann):
    """On CANN 8.3 verify compares it (tests/verify/test_mistakes.py)."""
    with ascend_ops.ascend(cann):
        check(fused, make_step(STEPS[name], BF16, padding=3), sliding_window)


@pytest.mark.parametrize(("cann", "reads_past"), [("8.3.rc2", False), ("8.5", True), ("9.0", True), ("9.1", False)])
def test_emulator_sees_a_kernel_read_past_the_end_of_sinks(cann, reads_past):
    step = make_step(STEPS["decode at the window's edge"], BF16)
    bare = dataclasses.replace(step, sinks=step.sinks.clone())
    with ascend_ops.ascend(cann):
        fused(step, WINDOW)
        with pytest.raises(ContractError, match="R92") if reads_past else contextlib.nullcontext():
            fused(bare, WINDOW)


def test_ascend_attention_is_one_call_by_default(calls):
    step = make_step(STEPS["mixed, one without rows"], BF16, padding=5)
    out = torch.full_like(step.query, float("nan"))
    step.run(out=out)
    assert [name for name, _ in calls] == [FIA]
    assert (out[-5:] == 0).all()


@pytest.mark.parametrize(
    "requests",
    [[(1300, 1300)], [(1100, 2200)], [(1, 2200)], [(1, 300), (1100, 1100), (1, 129), (64, 200)]],
    ids=["prefill", "chunk", "decode", "mixed"],
)
@pytest.mark.parametrize("sliding_window", [None, WINDOW])
def test_more_tokens_than_half_the_mask(calls, requests, sliding_window):
    """The mask is 2048 wide for any length: from 1024 rows on a cut one was read at shifted places upstream."""
    check(fused, make_step(requests, BF16), sliding_window)


@pytest.mark.parametrize("rows", [1300, 64, 1], ids=["prefill", "chunk", "decode"])
@pytest.mark.parametrize(("back", "seen"), [(127, True), (128, False)])
def test_window_keeps_128_keys_not_129(calls, rows, back, seen):
    step = make_step([(rows, 1300)], BF16)
    step.query[:] = 0  # all visible keys weigh the same, only the planted value counts
    step.value_cache[:] = 0
    block, offset = divmod(1299 - back, 128)
    step.value_cache[step.metadata.block_table[0, block], offset] = 10000.0
    assert bool((fused(step, WINDOW)[-1] > 1).all()) is seen
    assert bool((fused(step, None)[-1] > 1).all()), "full attention sees it in any case"


def test_prefix_shared_by_many_requests_takes_two_calls(calls):
    """The operator counts a shared block for each request that reads it, and refuses more than the cache has."""
    step = make_step([(300, 300)], BF16)
    together = AttentionMetadata(
        (0, 100, 200, 300), (300, 300, 300), step.metadata.block_table.expand(3, -1).contiguous(), torch.arange(300)
    )
    shared = dataclasses.replace(step, metadata=together)
    assert step.key_cache.shape[0] == 5, "three blocks in use, each of three requests reads them all"
    check(fused, shared, WINDOW)
    assert [kwargs["actual_seq_kvlen"] for _, kwargs in calls] == [[300], [300], [300]]
    assert [kwargs["actual_seq_qlen"] for _, kwargs in calls] == [[100], [100], [100]]


def test_a_table_with_rows_to_spare_is_cut_to_the_batch(calls):
    """vLLM's has a row for each request that may ever run; the operator takes exactly the batch's."""
    step = make_step([(3, 20), (1, 133)], BF16)
    table = step.metadata.block_table
    roomy = dataclasses.replace(step.metadata, block_table=torch.cat((table, table)), plans={})
    check(fused, dataclasses.replace(step, metadata=roomy), WINDOW)
    assert calls[-1][1]["block_table"].shape[0] == 2


@pytest.mark.parametrize(
    ("num_blocks", "expected"), [(15, [5]), (14, [4, 1]), (6, [2, 2, 1]), (5, [1] * 5), (3, [1] * 5)]
)
def test_as_many_requests_go_into_a_call_as_the_cache_has_blocks_for(num_blocks, expected):
    """Five requests of three blocks each, which they share."""
    step = AttentionMetadata(
        (0, 1, 2, 3, 4, 5), (300,) * 5, torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    )
    parts = ascend.parts(step, num_blocks, 128)
    assert [len(part.seq_lens) for part in parts] == expected
    assert [part.requests.start for part in parts] == [sum(expected[:i]) for i in range(len(expected))]
    assert all(part.query_ends == list(range(1, len(part.seq_lens) + 1)) for part in parts)


@pytest.mark.parametrize(
    ("apart", "requests", "window", "more"),
    [
        (True, [(1, 20), (1, 513)], None, 1),
        (False, [(1, 20), (1, 513)], None, 0),
        (True, [(1, 20), (1, 512)], None, 0),
        (True, [(1, 20), (1, 513)], WINDOW, 0),
        (True, [(2, 20), (1, 513)], None, 0),
    ],
    ids=["merged wrongly", "not on 8.3", "one tile of keys", "a window", "two rows already"],
)
def test_heads_of_a_decode_over_512_keys_are_merged_or_cost_a_row(calls, monkeypatch, apart, requests, window, more):
    """CANN 8.3 merges them wrongly; one request more, of two rows, keeps them apart, and its rows go nowhere."""
    monkeypatch.setattr(ascend, "_heads_apart", apart)
    check(fused, make_step(requests, BF16, padding=3), window)
    (asked,) = [kwargs for name, kwargs in calls if name == FIA]
    ends, rows = [0, *asked["actual_seq_qlen"]], [count for count, _ in requests] + [2] * more
    assert [end - begin for begin, end in itertools.pairwise(ends)] == rows
    assert asked["query"].shape[0] == sum(rows)
    assert asked["block_table"].shape[0] == len(rows)


@pytest.mark.parametrize(
    ("num_blocks", "most", "expected"), [(15, 4096, [4, 1]), (16, 4096, [5]), (100, 5, [4, 1]), (100, 6, [5])]
)
def test_the_request_that_keeps_heads_apart_is_counted(monkeypatch, num_blocks, most, expected):
    """It reads a block, and is a request more; both limits are CANN's."""
    monkeypatch.setattr(ascend, "_heads_apart", True)
    monkeypatch.setattr(ascend, "MAX_REQUESTS", most)
    step = AttentionMetadata(
        (0, 1, 2, 3, 4, 5), (300,) * 5, torch.zeros(5, 3, dtype=torch.int32), torch.zeros(5, dtype=torch.int64)
    )
    assert [len(part.seq_lens) for part in ascend.parts(step, num_blocks, 128)] == expected


def test_requests_without_rows_cost_no_call_of_their_own():
    step = AttentionMetadata((0, 1, 1), (300, 300), torch.zeros(2, 3, dtype=torch.int32), torch.zeros(1))
    (part,) = ascend.parts(step, 3, 128)
    assert (part.requests, part.rows, part.query_ends, part.seq_lens) == (slice(0, 1), slice(0, 1), [1], [300])


def test_more_requests_than_one_call_takes(calls, monkeypatch):
    monkeypatch.setattr(ascend, "MAX_REQUESTS", 4)
    check(fused, make_step(STEPS["decode at the window's edge"], BF16), WINDOW)
    assert [len(kwargs["actual_seq_qlen"]) for _, kwargs in calls] == [4, 4, 3]


def test_lists_are_made_once_a_step(calls):
    step = make_step(STEPS["chunks that cross the window"], BF16)
    for window in (None, WINDOW):
        fused(step, window)
    assert calls[0][1]["actual_seq_qlen"] is calls[1][1]["actual_seq_qlen"]


def test_float32_and_foreign_block_sizes_are_refused_in_words(calls, monkeypatch):
    with pytest.raises(KernelError, match="needs bfloat16 query, got float32"):
        make_step(STEPS["one token"]).run(kernel="ascend")
    for head_dim in (32, 96):
        with pytest.raises(KernelError, match=f"handles head_dim 128 or 64, got {head_dim}"):
            make_step([(1, 5)], BF16, shape=Shape(head_dim=head_dim, block_size=128)).run(kernel="ascend")
    for block_size in (16, 192, 1152):
        monkeypatch.setattr(cases, "BLOCK_SIZE", block_size)
        with pytest.raises(KernelError, match=f"handles block_size 1024 or 128 .*, got {block_size}"):
            make_step([(1, 5)], BF16).run(kernel="ascend")
    monkeypatch.setattr(cases, "BLOCK_SIZE", 1024)
    check(lambda s, w: s.run(sliding_window=w, kernel="ascend"), make_step([(1, 5)], BF16), WINDOW)


def test_heads_of_the_published_models_and_their_shards_fit(calls):
    """64 query heads on 8 key heads, over 1, 2, 4 and 8 ranks."""
    for ranks in (1, 2, 4, 8):
        heads, kv_heads = 64 // ranks, 8 // ranks
        cache = torch.randn(2, 4, 128, kv_heads, 64).to(BF16)
        table = torch.tensor([[1, 2], [3, 0]], dtype=torch.int32)
        metadata = AttentionMetadata((0, 3, 4), (130, 5), table, torch.arange(4))
        step = cases.Step(torch.randn(4, heads, 64).to(BF16), *cache, metadata, torch.randn(heads).to(BF16))
        check(fused, step, WINDOW)


@pytest.mark.parametrize("slots", [torch.int32, torch.int64])
def test_new_keys_and_values_are_swapped_or_their_slots_not_taken(calls, slots):
    """The operator takes int32 slots and no others."""
    step = make_step([(3, 20), (1, 133)], BF16)
    metadata = dataclasses.replace(step.metadata, slot_mapping=step.metadata.slot_mapping.to(slots))
    new, places = torch.randn(2, 4, *step.key_cache.shape[2:]).to(BF16), step.metadata.slot_mapping
    write_kv_cache(*new, step.key_cache, step.value_cache, metadata, kernel="ascend")
    for cache, wanted in zip((step.key_cache, step.value_cache), new, strict=True):
        assert torch.equal(cache.flatten(0, 1)[places], wanted)
