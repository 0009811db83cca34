"""The Triton kernels in Triton's interpreter, at sizes that a CPU can take. `test_triton_cuda.py` has the real ones."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels.tiles import trial
from npu_gptoss.verify.attention_cases import Shape, as_decode
from tests.attention.cases import HEAD_DIM, SCALE, check, interleaved, make_step
from tests.attention.triton_run import MISTAKES, check_fp8, check_notices, check_written, run_triton
from tests.tolerances import assert_close
from tests.triton import TRITON_HERE

launch_decode = pytest.importorskip("npu_gptoss.attention.triton.launch_decode", reason="needs triton")

pytestmark = TRITON_HERE

DECODE = [(1, keys) for keys in (1, 15, 16, 17, 127, 128, 129, 300)]
STEPS = {
    "decode": DECODE,
    "prompts": [(rows, rows) for rows in (2, 16, 17, 129)],
    "chunks": [(40, 100), (20, 148), (3, 131), (2, 33)],
    "mixed, one without rows": [(1, 40), (0, 33), (5, 5), (1, 213), (30, 150)],
}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch):
    """A GPU is filled with hundreds of programs, which the interpreter runs one by one."""
    monkeypatch.setattr(launch_decode, "WIDE", dataclasses.replace(launch_decode.WIDE, programs=64))
    full = launch_decode.decode_config(torch.bfloat16, False, 1)
    with trial("attention.decode.full", dataclasses.asdict(full) | {"programs": 64}):
        yield


@pytest.mark.parametrize(
    ("sliding_window", "dtype"),
    [(None, torch.float32), (128, torch.float32), (17, torch.float32), (None, torch.bfloat16), (128, torch.bfloat16)],
)
@pytest.mark.parametrize("name", STEPS)
def test_kernel_equals_definition(name, sliding_window, dtype):
    check(run_triton, make_step(STEPS[name], dtype, padding=3), sliding_window, rounded_weights=True)


@pytest.mark.parametrize("name", ["decode", "mixed, one without rows"])
def test_a_cache_in_fp8_is_read_as_its_numbers_in_bfloat16(name):
    check_fp8(make_step(STEPS[name], torch.bfloat16), 128)


@pytest.mark.parametrize("sliding_window", [None, 17])
def test_the_invariant_kernel_equals_the_definition(sliding_window):
    """On single rows, too, and with lengths that only the device knows."""
    run = functools.partial(run_triton, kernel="triton_invariant")
    check(run, make_step(STEPS["mixed, one without rows"], padding=3), sliding_window)
    check(run, as_decode(make_step(DECODE), max_seq_len=300, padding=2), sliding_window)


@pytest.mark.parametrize("sliding_window", [None, 17])
@pytest.mark.parametrize("name", STEPS)
def test_values_that_follow_their_keys_in_one_tensor_give_the_same_bits(name, sliding_window):
    step = make_step(STEPS[name])
    assert torch.equal(run_triton(interleaved(step), sliding_window), run_triton(step, sliding_window))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(heads=2, kv_heads=2, head_dim=16, block_size=16),
        Shape(heads=6, kv_heads=2, head_dim=32, block_size=32),
        Shape(heads=8, kv_heads=1, head_dim=64, block_size=64),
        Shape(heads=16, kv_heads=1, head_dim=128, block_size=128),
        Shape(heads=32, kv_heads=1, head_dim=16, block_size=256),
        Shape(heads=4, kv_heads=2, head_dim=16, block_size=48),
        Shape(heads=4, kv_heads=2, head_dim=16, block_size=512),
    ],
    ids=str,
)
def test_any_number_of_heads_to_a_key_head_and_any_block_size(shape):
    check(run_triton, make_step([(1, 70), (30, 90)], shape=shape), None)
    check(run_triton, make_step([(1, 70), (30, 90)], shape=shape), 40)


@pytest.mark.parametrize(
    "run", [run_triton, lambda step, window: step.run(sliding_window=window)], ids=["triton", "cpu"]
)
@pytest.mark.parametrize("sliding_window", [None, 17])
def test_decode_rows_use_device_lengths_and_not_the_hosts_bound(run, sliding_window):
    step = make_step([(1, 40), (0, 33), (5, 50), (1, 213), (1, 1)], padding=2)
    known = step.metadata
    lengths = torch.tensor(known.seq_lens, dtype=torch.int32)
    bounds = [keys + 3 if rows == 1 else keys for keys, rows in zip(known.seq_lens, (1, 0, 5, 1, 1), strict=True)]
    told = dataclasses.replace(known, seq_lens=tuple(bounds), lengths=lengths, plans={})
    assert_close(
        run(dataclasses.replace(step, metadata=told), sliding_window), run(step, sliding_window), torch.float32
    )


@pytest.mark.parametrize("splits", [1, 2, 4, 16])
def test_the_sink_counts_once_however_many_programs_share_the_keys(splits, monkeypatch):
    monkeypatch.setattr(launch_decode, "splits_for", lambda *_: splits)
    check(run_triton, make_step([(1, 17), (1, 128), (1, 300)]), None)
    assert not launch_decode.arrivals(1, torch.device("cpu")).any(), "a launch leaves its counters at zero for the next"


def test_graph_reads_new_lengths_and_padding_rows_are_zero():
    step = as_decode(make_step(DECODE), max_seq_len=400, padding=2)
    for _ in range(2):
        for sliding_window in (None, 128):
            out = run_triton(step, sliding_window)
            assert (out[-2:] == 0).all()
            check(lambda *_, out=out: out, step, sliding_window)
        step.metadata.lengths[3:8] -= 9  # in place, as a replay does


def test_padded_graph_computes_the_bits_of_the_eager_step():
    step = make_step([(1, keys) for keys in (1, 40, 150)], shape=Shape(heads=4, kv_heads=1))
    graph = as_decode(step, max_seq_len=4096, padding=1)
    for sliding_window in (None, 128):
        assert torch.equal(run_triton(graph, sliding_window)[:-1], run_triton(step, sliding_window))


def test_first_keys_loaded_before_the_newest_is_there_change_nothing(monkeypatch):
    step = as_decode(make_step(DECODE), max_seq_len=400, padding=2)
    want = [run_triton(step, window) for window in (None, 17)]
    monkeypatch.setattr(launch_decode, "SETTLED_ROWS", 1000)
    assert all(torch.equal(run_triton(step, w), one) for w, one in zip((None, 17), want, strict=True))


def test_a_length_beyond_the_table_is_cut_there():
    """A step that will be discarded may be one token too long; it must not read beyond the table."""
    step = as_decode(make_step([(1, 32)]), max_seq_len=32)
    want = run_triton(step, None)
    step.metadata.lengths[0] = 33
    assert_close(run_triton(step, None), want)


def test_many_rows_of_a_window_layer_run_in_smaller_programs(monkeypatch):
    monkeypatch.setattr(launch_decode, "MANY_ROWS", 4)
    few, many = (launch_decode.decode_config(torch.bfloat16, True, rows) for rows in (2, 3))
    assert many.keys < few.keys
    check(run_triton, make_step(DECODE, torch.bfloat16), 128, rounded_weights=True)


def test_a_step_of_decode_makes_one_plan_for_all_layers():
    step = make_step([(1, 20), (1, 30)])
    run_triton(step, None)
    run_triton(step, 128)
    assert len(step.metadata.plans) == 1


def test_many_prompts_are_gathered_in_rounds_of_bounded_size(monkeypatch):
    from npu_gptoss.attention.triton import plan

    monkeypatch.setattr(plan, "ROUND_KEYS", 100)
    step = make_step([(60, 60), (1, 9), (50, 70), (20, 30)])
    check(run_triton, step, None)
    (made,) = step.metadata.plans.values()
    assert [len(prompts.requests) for prompts in made.rounds] == [1, 2]


def test_a_window_layer_gathers_only_the_keys_that_a_row_sees():
    step = make_step([(20, 900)])
    check(run_triton, step, 128)
    ((prompts,),) = (made.rounds for made in step.metadata.plans.values())
    assert prompts.longest < 20 + 127 + 128


def test_tiles_with_most_keys_run_first():
    from npu_gptoss.attention.triton.plan import make_plan

    metadata = make_step([(40, 40), (33, 233)]).metadata
    (prompts,) = make_plan(metadata, None, 16, 32, torch.device("cpu")).rounds
    assert prompts.tiles.tolist() == [[1, 2], [1, 1], [1, 0], [0, 2], [0, 1], [0, 0]]
    assert prompts.requests.tolist() == [[0, 0, 40, 0, 0, 0], [1, 40, 33, 200, 0, 64]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_new_keys_land_in_their_slots_and_a_negative_slot_is_left_out(dtype):
    check_written(make_step([(3, 20), (1, 33)], dtype))


def test_queries_and_results_with_strides_of_their_own():
    step = make_step([(1, 40), (30, 50)])
    wide = torch.full((*step.query.shape[:2], 2 * HEAD_DIM), float("nan"))
    wide[..., :HEAD_DIM] = step.query
    out = torch.full_like(wide, 7.0)
    strided = dataclasses.replace(step, query=wide[..., :HEAD_DIM])
    check(lambda s, w: run_triton(s, w, out=out[..., :HEAD_DIM]), strided, None)
    assert (out[..., HEAD_DIM:] == 7).all()


def test_arguments_that_kernels_cannot_take_are_refused():
    step = make_step([(1, 5)])
    with pytest.raises(InputError, match="scale must be positive, got -1"):
        run_triton(step, None, scale=-1.0)
    spread = dataclasses.replace(step, key_cache=step.key_cache.transpose(0, 1).contiguous().transpose(0, 1))
    with pytest.raises(InputError, match="key_cache and value_cache must be contiguous"):
        run_triton(spread, None)


@pytest.mark.parametrize(("kernel", "mistake"), [each for each in MISTAKES if each[0] != "hopper"])
def test_the_check_notices_a_mistake(kernel, mistake, monkeypatch, tmp_path):
    step, windows = make_step([(1, 17), (1, 128), (1, 300)]), (None, 128)
    if kernel == "settled":
        monkeypatch.setattr(launch_decode, "SETTLED_ROWS", 1000)
        step = as_decode(make_step(DECODE), max_seq_len=400)
    elif kernel != "decode":
        step, windows = make_step([(30, 80), (17, 17)]), (None, 20)
    check_notices(kernel, mistake, monkeypatch, tmp_path, step, windows)


def test_the_scale_is_the_callers():
    step = make_step([(1, 40), (20, 30)])
    with pytest.raises(AssertionError):
        check(lambda s, w: run_triton(s, w, scale=2 * SCALE), step, None)
