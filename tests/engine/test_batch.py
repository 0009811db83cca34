"""The tensors of a step: one row a token, each with its own place in the cache."""

from __future__ import annotations

import torch

from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.request import Request, SamplingParams
from npu_gptoss.engine.scheduler import Chunk


def make_request(token_ids: list[int], block_ids: list[int]) -> Request:
    request = Request(len(token_ids), token_ids, SamplingParams(), seed=0, stop_token_ids=frozenset(), max_length=99)
    request.block_ids = block_ids
    return request


def test_chunks_of_a_prompt_and_a_decoding_request_are_packed_in_order() -> None:
    prompt = make_request([10, 11, 12, 13, 14, 15], [7, 2])
    decoding = make_request([20, 21, 22], [4])
    batch = pack([Chunk(prompt, 3, 5), Chunk(decoding, 2, 3)], block_size=4, device=torch.device("cpu"))
    assert batch.input_ids.tolist() == [13, 14, 22]
    assert batch.positions.tolist() == [3, 4, 2]
    assert batch.first_rows == (0, 2)
    metadata = batch.metadata
    assert metadata.query_start_loc == (0, 2, 3)
    assert metadata.seq_lens == (5, 3)  # keys that are in the cache after this step, not those of the whole prompt
    assert metadata.block_table.tolist() == [[7, 2], [4, 0]]
    assert metadata.slot_mapping.tolist() == [7 * 4 + 3, 2 * 4, 4 * 4 + 2]
    assert (metadata.block_table.dtype, metadata.slot_mapping.dtype) == (torch.int32, torch.int64)
    assert (batch.input_ids.dtype, batch.positions.dtype) == (torch.int64, torch.int64)
