"""A row of the runner's batch keeps no mask of the request before."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch
from vllm import SamplingParams
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from tests.serving.compat.of_release import OLD

pytestmark = pytest.mark.serving


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
    def neighbours() -> dict[str, bool]:
        batch = a_batch()
        for name in ("a", "b"):
            batch.add_request(a_row(name, [3]))
        bound(batch)
        batch.remove_request("a")
        batch.condense()  # b goes to a's row
        bound(batch)
        batch.add_request(a_row("honest", None))
        return bound(batch)

    with patched("row-masks"):
        assert neighbours() == {"b": True, "honest": False}


def test_swapped_rows_keep_their_own_allowed_tokens(patched):
    def exchanged() -> dict[str, bool]:
        batch = a_batch()
        batch.add_request(a_row("a", [3]))
        batch.add_request(a_row("honest", None))
        batch.swap_states(0, 1)
        return bound(batch)

    with patched("row-masks"):
        assert exchanged() == {"a": True, "honest": False}
