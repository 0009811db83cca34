"""A row of the runner's batch depends on its own request: its seed, and its mask of allowed tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from tests.serving.compat.in_process import HONEST, core_of, greedy, run
from tests.serving.compat.of_release import LINE, OLD

only_0_11 = pytest.mark.skipif(not OLD, reason="the repair is for vLLM 0.11")

SEEDED = {"temperature": 1.0, "seed": 7, "max_tokens": 12}
REPAIRED = ("seed-rows", "seed-neighbours")


def cut(engine: Any, budget: int, *requests: Any) -> list[Any]:
    """`run`, with at most `budget` tokens a step."""
    scheduler = core_of(engine).scheduler
    scheduler.max_num_scheduled_tokens = budget
    try:
        return run(engine, *requests)
    finally:
        scheduler.max_num_scheduled_tokens = scheduler.scheduler_config.max_num_batched_tokens


@only_0_11
@pytest.mark.parametrize("budget", [9, 16, 39])
def test_seed_draws_the_same_tokens_when_its_prompt_is_cut(engine, patched, budget):
    asked = (HONEST, greedy(**SEEDED))
    with patched(*REPAIRED):
        uncut = run(engine, asked)
        assert cut(engine, budget, asked) == uncut
        assert run(engine, (HONEST, greedy(**SEEDED | {"seed": 8}))) != uncut


@only_0_11
def test_seed_draws_the_same_tokens_with_unseeded_neighbours(engine, patched):
    asked = (HONEST, greedy(**SEEDED))
    others = [
        (HONEST[::-1], greedy()),
        (HONEST[5:], greedy(temperature=0.7)),
        (HONEST[9:], greedy(**SEEDED | {"seed": 9})),
    ]
    with patched():
        alone = run(engine, asked)
    with patched(*REPAIRED):
        assert run(engine, asked) == alone
        first, neighbour, _, last = run(engine, asked, *others)
        assert [first] == alone
        assert [neighbour, last] == [run(engine, other)[0] for other in (others[0], others[2])]
        # a cut prompt and rows that decode in one step
        assert cut(engine, 20, others[0], asked)[1] == alone[0]


def a_row(name: str, allowed: list[int] | None) -> CachedRequestState:
    sampling = SamplingParams(temperature=0, allowed_token_ids=allowed)
    given = {"req_id": name, "prompt_token_ids": [1, 2], "mm_features": [], "sampling_params": sampling}
    given |= {"generator": None, "block_ids": ([0],), "num_computed_tokens": 0, "output_token_ids": []}
    given |= {"pooling_params": None} if OLD else {}
    return CachedRequestState(**given)


def bound(batch: InputBatch) -> dict[str, bool]:
    """Returns for each request whether a token is forbidden to it."""
    batch.refresh_metadata()
    mask = batch.sampling_metadata.allowed_token_ids_mask
    return {name: bool(mask[index].any()) for name, index in batch.req_id_to_index.items()}


def a_batch() -> InputBatch:
    sizes = {"block_sizes": [16]} | ({} if OLD else {"kernel_block_sizes": [16]})
    return InputBatch(4, 32, 64, torch.device("cpu"), False, vocab_size=8, **sizes)


def test_allowed_tokens_do_not_restrict_the_next_request_of_a_row(patched):
    with patched("row-masks"):
        batch = a_batch()
        for name in ("a", "b"):
            batch.add_request(a_row(name, [3]))
        bound(batch)
        batch.remove_request("a")
        batch.condense()  # b goes to a's row
        bound(batch)
        batch.add_request(a_row("honest", None))
        assert bound(batch) == {"b": True, "honest": False}


def test_swapped_rows_keep_their_own_allowed_tokens(patched):
    with patched("row-masks"):
        batch = a_batch()
        batch.add_request(a_row("a", [3]))
        batch.add_request(a_row("honest", None))
        batch.swap_states(0, 1)
        assert bound(batch) == {"a": True, "honest": False}


class Drawn(TorchDispatchMode):
    """The streams on which noise is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.exponential_.default:
            self.streams.append(torch.npu.current_stream())
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(LINE != "0.23", reason="the repair is for vllm-ascend 0.23")
@pytest.mark.parametrize("repaired", [False, True])
def test_a_next_steps_noise_does_not_overwrite_that_of_this_one(patched, repaired):
    """Memory of another stream is free for that stream again before this one has read it."""
    from vllm_ascend.sample import sampler

    with patched(*["ascend-sampling-noise"] * repaired), Drawn() as drawn:
        tokens = [
            sampler.random_sample(
                torch.full((2, 50), 0.02, device="npu"), {0: torch.Generator("npu").manual_seed(seed)}
            ).tolist()[0]
            for seed in (7, 7, 8)
        ]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(drawn.streams) == 6, "all rows, and the seeded one again"
    assert {stream == torch.npu.current_stream() for stream in drawn.streams} == {repaired}


@pytest.mark.skipif(LINE != "0.23", reason="the repair is for vllm-ascend 0.23")
@pytest.mark.parametrize("repaired", [False, True])
def test_kernels_that_judge_drafts_have_memory_around_the_ends(patched, repaired):
    """Four read `cu_num_draft_tokens[-1]`: error 507035, now and then (`stock_triton_cases.py`)."""
    from vllm_ascend.worker.model_runner_v1 import NPUModelRunner

    runner = object.__new__(NPUModelRunner)
    runner.arange_np, runner._arange_scratch = np.arange(64), np.zeros(64, np.int64)
    runner.pcp_size, runner.device = 1, torch.device("npu")
    runner.input_ids = SimpleNamespace(gpu=torch.arange(99, device="npu"))
    with patched(*["ascend-draft-ends"] * repaired):
        ends = runner._calc_spec_decode_metadata(np.array([2, 0, 3]), np.array([3, 4, 8]), None).cu_num_draft_tokens
    assert (ends.tolist(), ends.dtype, ends.data_ptr() % 32) == ([2, 2, 5], torch.int32, 0)
    behind = ends.untyped_storage().nbytes() // 4 - ends.storage_offset() - 3
    assert (ends.storage_offset(), behind) == ((8, 3 + 96) if repaired else (0, 0))


@pytest.mark.skipif(LINE != "0.23", reason="the repair is for vllm-ascend 0.23")
@pytest.mark.parametrize(("rows", "tile"), [((1, 1, 1), 16), ((1, 6, 40), 16), ((2, 40, 7), 1024)])
def test_a_decode_steps_slots_are_made_in_small_tiles(patched, monkeypatch, rows, tile):
    """The scalar unit walks a whole tile; of a step with more rows a small one is no smaller part."""
    from vllm_ascend.worker import block_table

    asked, kernel = [], block_table._compute_slot_mapping_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: (asked.append(options["BLOCK_SIZE"]), kernel[grid](*given, **options))

    monkeypatch.setattr(block_table, "_compute_slot_mapping_kernel", Watched())
    lengths, starts = np.array([130, 61, 500]), np.cumsum([0, *rows])
    positions = np.concatenate([np.arange(length - count, length) for length, count in zip(lengths, rows, strict=True)])
    found = []
    for repairs in ((), ("ascend-slots",)):
        table = object.__new__(block_table.BlockTable)
        table.pcp_world_size = table.dcp_world_size = table.cp_kv_cache_interleave_size = 1
        table.pcp_rank = table.dcp_rank = 0
        table.block_size, table.max_num_batched_tokens = 128, 100
        table.block_table = SimpleNamespace(gpu=torch.tensor([[3, 9, 0, 0], [4, 0, 0, 0], [7, 5, 6, 8]]).int().npu())
        table.slot_mapping = SimpleNamespace(gpu=torch.full((110,), 99, dtype=torch.int32).npu())
        with patched(*repairs):
            table.compute_slot_mapping(3, torch.tensor(starts, dtype=torch.int32).npu(), torch.tensor(positions).npu())
        found.append(table.slot_mapping.gpu.tolist())
    assert found[0] == found[1]
    assert found[0][sum(rows) :] == [-1] * (100 - sum(rows)) + [99] * 10
    assert found[0][0] == {1: 9 * 128 + 1, 2: 9 * 128}[rows[0]]
    assert asked == [1024, tile]
