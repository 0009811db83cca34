"""The scripts that drafters follow, without vLLM and without a GPU."""

from __future__ import annotations

from types import SimpleNamespace as Having

import torch

from tests.serving.cuda.answers import RIGHT, SHIFT, WRONG, scripted

RECORD = [[10, 11, 12, 13], [20, 21, 22, 23]]


def proposed(drafter: str, *, dummy_run: bool = False) -> list[list[int]]:
    """Three drafts each: of the second prompt in slot 5, which has 7 tokens and two behind them, and of the first in
    slot 2, which has 3 tokens and three behind them. The prompts are asked for the second time."""
    lengths = torch.zeros(8, dtype=torch.int32)
    lengths[5], lengths[2] = 9, 6
    states = Having(total_len=Having(gpu=lengths), prompt_len=Having(np=[0, 0, 3, 0, 0, 7, 0, 0]))
    self = Having(drafts=torch.full((4, 3), -1), req_states=states)
    slots = torch.tensor([5, 2])
    batch = Having(num_reqs=2, req_ids=["3-ab12", "2-cd34"], idx_mapping=slots, idx_mapping_np=slots.numpy())
    propose = scripted(RECORD, SHIFT[drafter], 24)
    return propose(self, input_batch=batch, num_sampled=None, dummy_run=dummy_run).tolist()


def test_a_right_script_goes_on_where_its_request_is():
    assert proposed(RIGHT) == [[22, 23, 0], [13, 0, 0]]


def test_a_wrong_script_proposes_another_token_of_the_vocabulary_at_each_place():
    assert proposed(WRONG) == [[23, 0, 1], [14, 1, 1]]


def test_a_run_of_vllms_without_requests_reads_none():
    assert proposed(RIGHT, dummy_run=True) == [[-1] * 3] * 2
