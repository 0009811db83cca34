"""Stock's Triton kernels of a gpt-oss step on vllm-ascend 0.23, against its results without Triton."""

from __future__ import annotations

import re
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch_npu  # noqa: F401
import vllm_ascend.platform  # noqa: F401
from ascend_emulator import trace
from ascend_emulator.compiler.host import OutOfBounds
from torch.nn.functional import pad
from vllm.model_executor.layers.utils import apply_penalties
from vllm.v1.worker.block_table import _compute_slot_mapping_kernel
from vllm_ascend.ops.triton import bincount, penalty, reject_sample, rope, triton_utils
from vllm_ascend.ops.triton.spec_decode.utils import prepare_inputs_padded_kernel
from vllm_ascend.sample import rejection_sampler as torch_ways

VOCABULARY = 5000
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


def case_rotary_embedding() -> None:
    """64 query heads and 8 key heads, as in gpt-oss; one token, and more than the card's vector cores."""
    for tokens in (1, 50):
        query, key = torch.randn(tokens, 64, 64), torch.randn(tokens, 8, 64)
        angles = torch.rand(100, 32) * 7
        cache, positions = torch.cat((angles.cos(), angles.sin()), 1), torch.randint(0, 100, (tokens,))
        cos, sin = cache[positions][:, None].chunk(2, -1)
        given = [query.npu(), key.npu()]
        got = rope.rope_forward_triton(*given, cos_sin_cache=cache.npu(), positions=positions.npu(), rope_dim=64)
        for have, x in zip(got, (query, key), strict=True):
            a, b = x.chunk(2, -1)
            want = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            torch.testing.assert_close(have.cpu(), want, atol=1e-6, rtol=1e-6)


def case_penalties() -> None:
    prompt, output = torch.randint(0, VOCABULARY, (3, 300)), torch.randint(0, 40, (3, 70))
    prompt[1, 200:] = output[0, 50:] = VOCABULARY  # padding
    logits = torch.randn(3, VOCABULARY)
    penalties = [torch.rand(3), torch.rand(3), torch.rand(3) + 0.7]
    want = apply_penalties(logits.clone(), prompt, output, *penalties)
    with mock.patch.object(bincount, "get_ascend_config", return_value=SimpleNamespace(enable_reduce_sample=False)):
        tensors = (logits, prompt, output, *penalties)
        got = penalty.apply_penalties_triton(*(tensor.npu() for tensor in tensors))
    assert torch.equal(got.cpu(), want)


# three requests with two, none and three drafts
DRAFTS = [2, 0, 3]
ENDS = torch.tensor([2, 2, 5], dtype=torch.int32)
DRAFT = torch.tensor([11, 12, 21, 22, 23], dtype=torch.int32)
BONUS = torch.tensor([[1], [2], [3]], dtype=torch.int32)


def nothing_yet() -> torch.Tensor:
    return torch.full((3, 4), -1, dtype=torch.int32)


def on_device(*values: object) -> list[object]:
    return [value.npu() if isinstance(value, torch.Tensor) else value for value in values]


def with_room(ends: torch.Tensor, before: int = 8, behind: int = 96) -> torch.Tensor:
    """As npu_gptoss makes them for these kernels, which read before the first and behind the last."""
    return pad(ends.npu(), (before, len(ends) + behind))[before : before + len(ends)]


def case_drafts_that_greedy_requests_keep() -> None:
    argmax = torch.tensor([11, 12, 21, 9, 23])
    for greedy in (None, torch.tensor([True, True, False])):
        out, got = nothing_yet(), nothing_yet().npu()
        torch_ways.rejection_greedy_sample_pytorch(out, ENDS, DRAFT, argmax, BONUS, DRAFTS, 3, greedy)
        ends, draft, chosen, bonus, is_greedy = on_device(with_room(ENDS), DRAFT, argmax, BONUS, greedy)
        reject_sample.rejection_greedy_sample_with_triton(
            got, DRAFTS, ends, draft, chosen, bonus, is_greedy, 3, *reject_sample.cal_grid_and_block_size(3)
        )
        assert torch.equal(got.cpu(), out), (got, out)


def case_one_draft_each() -> None:
    out, got = torch.full((3, 2), -1, dtype=torch.int32), torch.full((3, 2), -1, dtype=torch.int32).npu()
    draft, argmax = torch.tensor([4, 5, 6], dtype=torch.int32), torch.tensor([4, 9, 6])
    torch_ways.rejection_greedy_sample_spec_len_1_pytorch(out, draft, argmax, BONUS)
    draft, argmax, bonus = on_device(draft, argmax, BONUS)
    grid = reject_sample.cal_grid_and_block_size(3)
    reject_sample.rejection_greedy_sample_with_triton(got, [1, 1, 1], None, draft, argmax, bonus, None, 1, *grid)
    assert torch.equal(got.cpu(), out), (got, out)


def case_drafts_that_random_requests_keep() -> None:
    target, uniform = torch.softmax(torch.randn(5, 64), -1), torch.rand(5)
    recovered = torch.arange(50, 55, dtype=torch.int32)
    for greedy in (torch.zeros(3, dtype=torch.bool), torch.tensor([True, False, False])):
        for probabilities in (None, torch.softmax(torch.randn(5, 64), -1)):
            out, got = nothing_yet(), nothing_yet().npu()
            given = (ENDS, DRAFT, probabilities, target, BONUS, recovered, uniform, greedy)
            torch_ways.rejection_random_sample_pytorch(out, *given, 3, 64, IS_NGRAM=probabilities is None)
            ends, (draft, drafted, target_, *others) = with_room(ENDS), on_device(*given[1:])
            grid, size = reject_sample.cal_grid_and_block_size(3)
            reject_sample.rejection_random_sample_kernel[(grid,)](
                *(got, ends, draft, drafted, target_, None, *others, 3, 64, 64, 3, None),
                NO_ORI_TARGET_PROBS=True,
                NO_DRAFT_PROBS=probabilities is None,
                ENABLE_REDUCE_SAMPLING=False,
                ENTROPY_VERIFY=False,
                BLOCK_SIZE=size,
            )
            assert torch.equal(got.cpu(), out), (got, out)


def case_tokens_in_the_place_of_refused_drafts() -> None:
    target, q = torch.softmax(torch.randn(5, 64), -1), torch.rand(3, 64) + 0.1
    for probabilities in (None, torch.softmax(torch.randn(5, 64), -1)):
        out, got = torch.zeros(5, dtype=torch.int32), torch.zeros(5, dtype=torch.int32).npu()
        given = (ENDS, DRAFT, probabilities, target)
        torch_ways.sample_recovered_tokens_pytorch(out, *given, q, 64, IS_NGRAM=probabilities is None)
        reject_sample.sample_recovered_tokens_kernel[(3, 3)](
            *(got, with_room(ENDS), *on_device(*given[1:]), None, q.npu(), 64, 64),
            NO_DRAFT_PROBS=probabilities is None,
            ENABLE_REDUCE_SAMPLING=False,
            SUB_BLOCK=4 * 1024,
            multibuffer=False,
        )
        assert torch.equal(got.cpu(), out), (got, out)


def case_a_request_s_value_for_each_of_its_drafts() -> None:
    out, values = torch.zeros(5), torch.tensor([0.5, 0.0, 2.0])
    torch_ways.expand_pytorch(out, values, ENDS, 0, 1, MAX_NUM_TOKENS=32)
    got = torch.zeros(5).npu()
    reject_sample.expand_triton(3, got, values.npu(), with_room(ENDS), 0, 1, max_num_tokens=32)
    assert torch.equal(got.cpu(), out)


def case_where_a_drafter_reads_its_next_token() -> None:
    kept, starts = torch.tensor([1, 1, 4], dtype=torch.int32), torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    last, refused = (torch.zeros(3, dtype=torch.int32).npu() for _ in range(2))
    prepare_inputs_padded_kernel[(1,)](with_room(ENDS), kept.npu(), starts.npu(), last, refused, 3, BLOCK_SIZE=4)
    assert last.tolist() == [0, 3, 7]
    assert refused.tolist() == [2, 0, 0]


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
