"""The Triton kernels on a GPU at gpt-oss's shapes: graphs, equal bits, no waits; `npu-gptoss verify` has edges."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from npu_gptoss.attention import AttentionMetadata, paged_attention
from npu_gptoss.kernels import current_platform
from npu_gptoss.verify.attention_cases import GPT_OSS, Shape, as_decode
from tests.attention import triton_run
from tests.attention.cases import SCALE, Step, check, interleaved, make_step
from tests.attention.triton_run import MISTAKES, check_fp8, check_notices, run_triton
from tests.tolerances import assert_close
from tests.triton import ON_HOPPER

launch_decode = pytest.importorskip("npu_gptoss.attention.triton.launch_decode", reason="needs triton")

pytestmark = pytest.mark.cuda

EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 130, 191, 255, 256, 257, 1000, 1023, 1024, 1025, 4095, 9000)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
WINDOWS = pytest.mark.parametrize("sliding_window", [None, 128])


def on_gpu(requests: list[tuple[int, int]], dtype: torch.dtype = torch.bfloat16, **changes: object) -> Step:
    return make_step(requests, dtype, **{"shape": GPT_OSS, "device": "cuda", **changes})


@pytest.fixture(params=["triton", pytest.param("gluon", marks=ON_HOPPER)])
def language(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Prompts in full layers have two kernels; which one runs is the GPU's doing, here the test's."""
    if request.param == "gluon":
        monkeypatch.setattr(triton_run, "PLATFORM", current_platform())
    return request.param


def test_cuda_selects_triton():
    step = on_gpu([(1, 40)])
    assert torch.equal(step.run(), run_triton(step, None))


@DTYPES
@WINDOWS
def test_first_keys_loaded_before_the_newest_is_there_change_nothing(sliding_window, dtype, monkeypatch):
    step = as_decode(on_gpu([(1, keys) for keys in EDGES], dtype), max_seq_len=9000, padding=3)
    want = run_triton(step, sliding_window)
    monkeypatch.setattr(launch_decode, "SETTLED_ROWS", 1000)
    assert torch.equal(run_triton(step, sliding_window), want)


@WINDOWS
def test_a_cache_in_fp8_is_read_as_its_numbers_in_bfloat16(sliding_window):
    check_fp8(on_gpu([(1, keys) for keys in EDGES]), sliding_window)
    check_fp8(on_gpu([(1, 9000)]), sliding_window)
    check_fp8(on_gpu([(1, 50 + 3 * row) for row in range(150)]), sliding_window)  # tiles of many rows
    check_fp8(on_gpu([(700, 1500), (1, 900), (333, 333)]), sliding_window)


def rows_apart(step: Step, sliding_window: int | None, kernel: str | None) -> int:
    """Rows whose bits are others when a part of their request is a step of its own."""
    asked = {"kernel": kernel, "sliding_window": sliding_window}
    whole, steps = step.run(**asked), step.metadata
    apart = 0
    for request, keys in enumerate(steps.seq_lens):
        begin, end = steps.query_start_loc[request : request + 2]
        for first, last in ((begin, end), (begin, begin + 1), (end - 1, end), (begin + 3, end)):
            if first >= last:
                continue
            table, slots = steps.block_table[request : request + 1], steps.slot_mapping[first:last]
            part = AttentionMetadata((0, last - first), (keys - (end - last),), table, slots)
            alone = replace(step, query=step.query[first:last], metadata=part).run(**asked)
            apart += int((alone != whole[first:last]).flatten(1).any(1).sum())
    return apart


@WINDOWS
def test_the_invariant_kernel_gives_a_row_the_same_bits_in_any_step(sliding_window):
    step = on_gpu([(700, 1500), (1, 900), (333, 333), (1, 1), (60, 5000)])
    assert rows_apart(step, sliding_window, "triton_invariant") == 0
    assert rows_apart(step, sliding_window, None) > 0, "the check sees no other bits"


@WINDOWS
@pytest.mark.parametrize("block_size", [16, 48, 256, 512])
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (8, 8), (16, 8), (32, 8), (8, 1), (16, 1), (12, 4)])
def test_any_number_of_heads_to_a_key_head_and_any_block_size(heads, kv_heads, block_size, sliding_window, language):
    shape = Shape(heads=heads, kv_heads=kv_heads, head_dim=64, block_size=block_size)
    check(run_triton, on_gpu([(1, 300), (150, 400), (1, 9)], shape=shape), sliding_window, rounded_weights=True)


@DTYPES
@WINDOWS
def test_values_that_follow_their_keys_in_one_tensor_give_the_same_bits(sliding_window, dtype, language):
    step = on_gpu([(64, 100), (1, 700), (0, 33), (3, 131), (300, 9000), (1, 1)], dtype, padding=5)
    assert torch.equal(run_triton(interleaved(step), sliding_window), run_triton(step, sliding_window))


def test_one_captured_graph_follows_the_lengths_and_agrees_with_eager():
    step = as_decode(on_gpu([(1, keys) for keys in (40, 2000, 1, 129, 640)]), max_seq_len=4096, padding=3)
    run_triton(step, None)  # compiles
    graph, outs = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        outs += [run_triton(step, window) for window in (None, 128)]
    for shorter in (0, 0, 1, 30):
        step.metadata.lengths[:2] -= shorter
        graph.replay()
        for out, window in zip(outs, (None, 128), strict=True):
            assert torch.equal(out, run_triton(step, window))
            check(lambda *_, out=out: out, step, window, rounded_weights=True)
            assert (out[-3:] == 0).all()


def test_the_same_call_gives_the_same_bits(language):
    """The last program to arrive adds the shares up in their order, not in the order of arrival."""
    step = on_gpu([(1, 9000), (1, 5000), (300, 2000)])
    want = run_triton(step, None)
    assert all(torch.equal(run_triton(step, None), want) for _ in range(20))


def test_no_call_waits_for_the_device(language):
    steps = [on_gpu([(1, 300), (64, 90)]), as_decode(on_gpu([(1, 300), (1, 90)]), max_seq_len=400)]
    for step in steps:
        run_triton(step, None)  # compiles
        if step.metadata.plans:
            step.metadata.plans.clear()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run_triton(step, None)
            run_triton(step, 128)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("language", [pytest.param("gluon", marks=ON_HOPPER)], indirect=True)
@pytest.mark.parametrize(("kernel", "mistake"), [each for each in MISTAKES if each[0] == "hopper"])
def test_the_check_notices_a_mistake_in_the_gluon_kernel(kernel, mistake, language, monkeypatch, tmp_path):
    step = on_gpu([(30, 80), (17, 17), (200, 300), (400, 400)])
    check_notices(kernel, mistake, monkeypatch, tmp_path, step, (None,))


def test_long_prompt_against_its_last_rows_by_the_definition(language):
    """At 20 000 keys; the definition needs all scores in memory, so it computes the last rows only."""
    step = on_gpu([(20_000, 20_000)])
    got = run_triton(step, None)[-64:]
    metadata = type(step.metadata)((0, 64), (20_000,), step.metadata.block_table, step.metadata.slot_mapping)
    caches = step.key_cache, step.value_cache
    want = paged_attention(step.query[-64:], *caches, metadata, step.sinks, scale=SCALE, kernel="reference")
    assert_close(got, want, atol=2**-9)
