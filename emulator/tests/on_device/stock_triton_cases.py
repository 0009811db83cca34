"""Stock's Triton kernels of vllm-ascend 0.23 that need a repair of ours: their results, and what they read."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend.platform  # noqa: F401
from ascend_emulator import trace
from ascend_emulator.compiler.host import OutOfBounds
from torch.nn.functional import pad
from vllm.v1.worker.block_table import _compute_slot_mapping_kernel
from vllm_ascend.ops.triton import reject_sample, triton_utils
from vllm_ascend.sample import rejection_sampler as torch_ways

triton_utils.init_device_properties_triton()
# each launch is traced, which finds what it reads outside its tensors' memory
mock.patch.object(trace, "ENABLED", True).start()
mock.patch.object(trace, "operator").start()


def case_the_slots_of_a_step() -> None:
    """By vLLM's tile, and by the one to which the repair `ascend-slots` changes it; one request has more tokens."""
    slots_of_a_step(1024)
    slots_of_a_step(2)


def slots_of_a_step(tile: int) -> None:
    slots = torch.full((10,), 99, dtype=torch.int32).npu()
    tables = torch.tensor([[7, 3], [5, 0]], dtype=torch.int32).npu()
    starts = torch.tensor([0, 2, 5], dtype=torch.int32).npu()
    positions = torch.tensor([127, 128, 0, 1, 2]).npu()
    constants = {"TOTAL_CP_WORLD_SIZE": 1, "TOTAL_CP_RANK": 0, "CP_KV_CACHE_INTERLEAVE_SIZE": 1, "PAD_ID": -1}
    _compute_slot_mapping_kernel[(3,)](5, 8, starts, positions, tables, 2, 128, slots, BLOCK_SIZE=tile, **constants)
    assert slots.tolist() == [7 * 128 + 127, 3 * 128, 640, 641, 642, -1, -1, -1, 99, 99]


def on_device(*values: object) -> list[object]:
    return [value.npu() if isinstance(value, torch.Tensor) else value for value in values]


def with_room(ends: torch.Tensor, before: int = 8, behind: int = 96) -> torch.Tensor:
    """As npu_gptoss makes them for these kernels, which read before the first and behind the last."""
    return pad(ends.npu(), (before, len(ends) + behind))[before : before + len(ends)]


def many(ends: torch.Tensor) -> torch.Tensor:
    """What 90 requests, every other of them greedy, keep of two drafts each: more than the card has vector cores."""
    out, drafts, greedy = torch.full((90, 3), -1, dtype=torch.int32), torch.arange(180, dtype=torch.int32), GREEDY_OF_90
    argmax, bonus = torch.where(drafts % 5 > 0, drafts, 7).long(), torch.arange(90, dtype=torch.int32)[:, None] + 500
    if not ends.is_npu:
        torch_ways.rejection_greedy_sample_pytorch(out, ends, drafts, argmax, bonus, [2] * 90, 2, greedy)
        return out
    out, drafts, argmax, bonus, greedy = on_device(out, drafts, argmax, bonus, greedy)
    sizes = reject_sample.cal_grid_and_block_size(90)
    reject_sample.rejection_greedy_sample_with_triton(out, [2] * 90, ends, drafts, argmax, bonus, greedy, 2, *sizes)
    return out.cpu()


GREEDY_OF_90, ENDS_OF_90 = torch.arange(90) % 2 == 0, torch.arange(1, 91, dtype=torch.int32) * 2


def case_more_requests_than_cores() -> None:
    assert torch.equal(many(with_room(ENDS_OF_90)), many(ENDS_OF_90))


def case_numbers_before_the_first_end_and_behind_the_last_are_read() -> None:
    """vllm-ascend PR 16222. The compiler makes a load of the whole tile of one with two masks."""
    for room, byte in (({"before": 0}, "-4"), ({"behind": -90}, "+0")):
        with pytest.raises(OutOfBounds, match=re.escape(f"it touched byte {byte} from an edge")):
            many(with_room(ENDS_OF_90, **room))
