"""Calls that cannot be right are refused in words, before any kernel runs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from npu_gptoss import attention
from npu_gptoss.attention import AttentionMetadata, DecodeMetadata, LayerKernels, paged_attention, write_kv_cache
from npu_gptoss.errors import InputError
from npu_gptoss.kernels import KernelError, platform_override
from npu_gptoss.kernels.platform import SUPPORTED
from tests.attention.cases import BLOCK_SIZE, HEAD_DIM, HEADS, KV_HEADS, SCALE, in_one_tensor, make_step
from tests.refused import refused


def test_float16_is_refused_with_the_dtypes_that_work():
    step = make_step([(1, 5)], torch.float16)
    with pytest.raises(InputError, match="needs bfloat16 or float32 query, got float16"):
        step.run()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        *(
            (lambda step, sinks=sinks: {"sinks": sinks}, "sinks")
            for sinks in (None, torch.zeros(1), torch.zeros(HEADS, 1))
        ),
        (lambda step: {"sliding_window": 0}, "sliding_window"),
        (lambda step: {"query": step.query[:, :7], "sinks": step.sinks[:7]}, "query"),
        (lambda step: {"query": step.query[:2]}, "query"),
        (lambda step: {"query": step.query.flatten(1)}, "query"),
        (lambda step: {"key_cache": step.key_cache[..., :32]}, "key_cache"),
        (lambda step: {"value_cache": step.value_cache.flatten(0, 1)}, "value_cache"),
        (lambda step: {name: getattr(step, name)[:, :, :0] for name in ("key_cache", "value_cache")}, "query"),
        (lambda step: {"out": torch.empty(2, HEADS, HEAD_DIM)}, "out"),
    ],
)
def test_attention_that_cannot_be_right_is_refused(changes, field):
    step = make_step([(3, 5)])
    with refused(field):
        step.run(**changes(step))


def test_a_cache_that_the_new_keys_do_not_fit_is_refused():
    step = make_step([(3, 5)])
    key = torch.zeros(3, KV_HEADS, HEAD_DIM)
    for keys, values, field in (
        (step.key_cache[..., :32], step.value_cache, "key_cache"),
        (step.key_cache, step.value_cache[:, :, :1], "value_cache"),
    ):
        with refused(field):
            write_kv_cache(key, key, keys, values, step.metadata)
    with refused("value"):
        write_kv_cache(key, key[:2], step.key_cache, step.value_cache, step.metadata)


@pytest.mark.parametrize("kernel", ["small_ops", "reference"])
def test_slots_after_the_real_rows_are_never_written(kernel):
    step = make_step([(2, 20)], padding=2)
    real = step.metadata.slot_mapping[:2]
    free = [slot for slot in range(step.key_cache.shape[0] * BLOCK_SIZE) if slot not in real.tolist()][:2]
    metadata = dataclasses.replace(step.metadata, slot_mapping=torch.cat((real, torch.tensor(free))))
    key = torch.full((4, KV_HEADS, HEAD_DIM), 5.0)
    write_kv_cache(key, key, step.key_cache, step.value_cache, metadata, kernel=kernel)
    written = (step.key_cache.flatten(0, 1) == 5).flatten(1).all(1).nonzero().flatten().tolist()
    assert sorted(written) == sorted(real.tolist())


@pytest.mark.parametrize(
    ("kernel", "device"), [("reference", "cpu"), pytest.param("triton", "cuda", marks=pytest.mark.cuda)]
)
def test_a_cache_in_fp8_takes_its_largest_number_for_a_larger_one(kernel, device):
    """torch rounds it to NaN, which no later request would lose."""
    step = make_step([(2, 20)], torch.bfloat16).to(device)
    caches = [cache.to(torch.float8_e4m3fn) for cache in (step.key_cache, step.value_cache)]
    new = torch.full((2, KV_HEADS, HEAD_DIM), 1000.0, dtype=torch.bfloat16, device=device)
    write_kv_cache(new, -new, *caches, step.metadata, kernel=kernel)
    for cache, wanted in zip(caches, (448.0, -448.0), strict=True):
        assert (cache.flatten(0, 1).float()[step.metadata.slot_mapping] == wanted).all()


@pytest.mark.parametrize(
    "spread",
    [
        lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
        lambda cache: cache.repeat(1, 1, 2, 1)[:, :, :KV_HEADS],
        lambda cache: cache.mT.contiguous().mT,
    ],
    ids=["blocks inside", "heads left out", "dims outside"],
)
def test_a_cache_that_is_no_row_of_heads_is_refused(spread):
    """Flattened it would be a copy, and the new keys would be lost."""
    step = make_step([(3, 5)])
    key = torch.zeros(3, KV_HEADS, HEAD_DIM)
    for caches in (
        (spread(step.key_cache), step.value_cache),
        (step.key_cache, spread(step.value_cache)),
        (spread(step.key_cache), spread(step.value_cache)),
    ):
        with refused("key_cache"):
            write_kv_cache(key, key, *caches, step.metadata)


@pytest.mark.parametrize("kernel", ["small_ops", "reference"])
def test_keys_and_values_may_be_the_halves_of_one_tensor(kernel):
    step = make_step([(3, 5), (1, 40)])
    keys, values = in_one_tensor(step.key_cache, step.value_cache)
    new = torch.randn(2, 4, KV_HEADS, HEAD_DIM)
    write_kv_cache(*new, keys, values, step.metadata, kernel=kernel)
    write_kv_cache(*new, step.key_cache, step.value_cache, step.metadata, kernel=kernel)
    assert torch.equal(keys.nan_to_num(), step.key_cache.nan_to_num())
    assert torch.equal(values.nan_to_num(), step.value_cache.nan_to_num())
    assert torch.equal(step.run(key_cache=keys, value_cache=values), step.run())


def test_kernels_are_selected_by_the_dtype_of_the_cache_too():
    """Ascend's operators take bfloat16 only; a float32 cache would be read as if it were that."""
    step = make_step([(1, 5)], torch.bfloat16)
    wide = step.key_cache.float(), step.value_cache.float()
    key = torch.zeros(1, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    with platform_override("ascend", frozenset({"torch_npu"})):
        with pytest.raises(KernelError, match="needs bfloat16 kv, got float32"):
            write_kv_cache(key, key, *wide, step.metadata, kernel="ascend")
        with pytest.raises(KernelError, match="needs bfloat16 kv, got float32"):
            paged_attention(step.query, *wide, step.metadata, step.sinks, scale=SCALE, kernel="ascend")


def test_kernel_is_chosen_by_the_arguments_of_the_call(monkeypatch):
    asked = []

    def ask(operation, kernel, size, describe):
        call, traits = describe(size)
        asked.append((operation.name, str(call), traits))
        return lambda **arguments: None

    monkeypatch.setattr(attention, "chosen", ask)
    step = make_step([(2, 5)], torch.bfloat16)
    key = torch.zeros(2, KV_HEADS, HEAD_DIM)
    write_kv_cache(key, key, step.key_cache, step.value_cache, step.metadata)
    paged_attention(step.query.float(), step.key_cache, step.value_cache, step.metadata, step.sinks.half(), scale=SCALE)
    sizes = {"head_dim": HEAD_DIM, "block_size": BLOCK_SIZE}
    assert asked == [
        ("attention.write_kv", "key float32, kv bfloat16", sizes),
        (
            "attention.paged",
            "kv bfloat16, query float32, sinks float16",
            {**sizes, "sliding_window": False, "group_size": HEADS // KV_HEADS, "max_query_len": 2},
        ),
    ]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {1: "triton_decode", 2: "gluon_prefill"}),
        ({"sliding_window": 128}, {1: "triton_decode", 2: "triton_prefill"}),
        ({"dtype": torch.float32}, {1: "triton_decode", 2: "triton_prefill"}),
        ({"head_dim": 128}, {1: "triton_decode", 2: "triton_prefill"}),
        ({"heads": 128}, {1: "triton_decode", 2: "triton_prefill"}),
    ],
)
def test_each_hopper_kernel_is_selected_for_its_own_sizes(changes, expected):
    settings = {"sliding_window": None, "dtype": torch.bfloat16, "head_dim": 64, "heads": 64, **changes}
    query = torch.empty(9, settings["heads"], settings["head_dim"], dtype=settings["dtype"])
    cache = torch.empty(1, 16, 1, settings["head_dim"], dtype=settings["dtype"])
    with platform_override(SUPPORTED["cuda"]):
        _, attend = LayerKernels(settings["sliding_window"]).of(query, cache, query)
    assert {rows: attend.of(rows).name.rpartition(".")[2] for rows in (1, 2)} == expected


def test_a_step_without_rows_runs_no_kernel():
    """An operator may refuse empty tensors; this one does not exist here."""
    step = make_step([(0, 5)], padding=2)
    key = torch.zeros(2, KV_HEADS, HEAD_DIM)
    with platform_override("ascend", frozenset({"torch_npu"})):
        write_kv_cache(key, key, step.key_cache, step.value_cache, step.metadata, kernel="ascend")
        assert not step.run(kernel="ascend").any()


@pytest.mark.parametrize(
    ("start", "lengths", "field"),
    [
        ((), (), "query_start_loc"),
        ((1, 2), (3,), "query_start_loc"),
        ((0, 1), (3, 4), "query_start_loc"),
        ((0, 4), (3,), "seq_lens"),
        ((0, 2, 1), (3, 3), "seq_lens"),
        ((0, 1, 2, 3), (1, 1, 1), "block_table"),
        ((0, 3), (9,), "slot_mapping"),
    ],
)
def test_metadata_that_contradicts_itself_is_refused(start, lengths, field):
    with refused(field):
        AttentionMetadata(start, lengths, torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"lengths": torch.ones(3, dtype=torch.int64)}, "lengths"),
        ({"lengths": torch.ones(3, 1, dtype=torch.int32)}, "lengths"),
        ({"block_table": torch.zeros(2, 4, dtype=torch.int32)}, "block_table"),
        ({"slot_mapping": torch.zeros(2, dtype=torch.int64)}, "block_table"),
        ({"max_seq_len": 0}, "max_seq_len"),
    ],
)
def test_metadata_of_a_graph_that_contradicts_itself_is_refused(changes, field):
    """Kernels trust it: they would read lengths as pairs of halves, or beyond the table."""
    right = {
        "lengths": torch.ones(3, dtype=torch.int32),
        "block_table": torch.zeros(3, 4, dtype=torch.int32),
        "slot_mapping": torch.zeros(3, dtype=torch.int64),
        "max_seq_len": 64,
    }
    DecodeMetadata(**right)
    with refused(field):
        DecodeMetadata(**{**right, **changes})


def test_the_longest_of_a_step_need_not_be_its_first():
    """Grids of kernels are cut by these."""
    table, slots = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(6, dtype=torch.int64)
    step = AttentionMetadata((0, 1, 5, 6), (3, 9, 7), table, slots)
    assert (step.num_requests, step.num_tokens, step.max_query_len, step.max_seq_len) == (3, 6, 4, 9)
    nothing = AttentionMetadata((0,), (), table, slots)
    assert (nothing.num_requests, nothing.num_tokens, nothing.max_query_len, nothing.max_seq_len) == (0, 0, 0, 0)


def test_metadata_of_a_graph_looks_like_a_step_of_single_rows():
    step = DecodeMetadata(
        torch.tensor([5, 0, 7], dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3), max_seq_len=64
    )
    assert (step.num_requests, step.num_tokens, step.max_query_len) == (3, 3, 1)
    assert (step.query_start_loc, step.seq_lens) == ((0, 1, 2, 3), (5, 0, 7))
    step.plans["of this step"] = 1
    assert step.plans == {}  # the next replay has other lengths
