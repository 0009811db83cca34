"""A row of the runner's batch keeps nothing of the request that was there before.

vLLM 0.11.0 moves the last row into a gap and leaves its mask of allowed tokens behind: the next request there, which
allows all, is bound by it as long as any request of the batch has `allowed_token_ids`. And two rows that change places
end with one and the same mask, because the mask is exchanged through views. Both answer a neighbour wrongly in silence.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import expect_parameters, expect_source, repair, replace
from npu_gptoss.serving.compat.targets import ASCEND_BATCH, BATCH


@repair("row-masks", f"{BATCH}:InputBatch.add_request .swap_states", lines=("0.11",))
def install(module: ModuleType) -> None:
    """allowed_token_ids of one request bind another one that is given its row of the batch."""
    batch = module.InputBatch
    expect_parameters(batch.add_request, "self", "request")
    expect_parameters(batch.swap_states, "self", "i1", "i2")
    expect_source(batch.add_request, "self.allowed_token_ids_mask_cpu_tensor[req_index] = True", "return req_index")
    expect_source(batch.swap_states, "self.allowed_token_ids_mask_cpu_tensor[i1], ", "swap_dict_values(")
    original_add, original_swap = batch.add_request, batch.swap_states

    def add_request(self: Any, request: Any) -> int:
        index = original_add(self, request)
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None and request.req_id not in self.has_allowed_token_ids:
            mask[index] = False
        return index

    def swap_states(self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        swapped = None if mask is None else mask[[i2, i1]]  # a copy
        original_swap(self, i1, i2)
        if swapped is not None:
            mask[[i1, i2]] = swapped

    replace(batch, "add_request", add_request)
    replace(batch, "swap_states", swap_states)


@repair("row-masks-ascend", f"{ASCEND_BATCH}:InputBatch.add_request .swap_states", lines=("0.11",))
def install_ascend(module: ModuleType) -> None:
    """As row-masks, in vllm-ascend's worker."""
    from npu_gptoss.serving.compat.ascend import expect_release

    expect_release()
    install(module)
