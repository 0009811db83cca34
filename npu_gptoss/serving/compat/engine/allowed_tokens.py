"""Clears a batch row's mask of allowed tokens before the next request uses the row.

When vLLM moves the last row into a gap, it leaves the row's mask behind. As long as any request of the batch has
`allowed_token_ids`, the next request in that row is restricted by the old mask. When two rows are swapped, both end
with the same mask, because the mask is exchanged through views. Both defects silently change another request's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from npu_gptoss.serving.compat.patch import around, expect_parameters, expect_source, repair
from npu_gptoss.serving.compat.targets import ASCEND_BATCH, BATCH


@repair("row-masks", f"{BATCH}:InputBatch.add_request .swap_states", releases=("0.11", "0.23"), until="0.33")
def install(module: ModuleType) -> None:
    """The allowed_token_ids of one request also restrict the next request in the same row of the batch."""
    batch = module.InputBatch
    expect_parameters(batch.add_request, "self", "request")
    expect_parameters(batch.swap_states, "self", "i1", "i2")
    expect_source(batch.add_request, "self.allowed_token_ids_mask_cpu_tensor[req_index] = True", "return req_index")
    expect_source(batch.swap_states, "self.allowed_token_ids_mask_cpu_tensor[i1], ", "swap_dict_values(")

    @around(batch, "add_request")
    def add_request(original: Callable[..., int], self: Any, request: Any) -> int:
        index = original(self, request)
        mask = self.allowed_token_ids_mask_cpu_tensor
        if mask is not None and request.req_id not in self.has_allowed_token_ids:
            mask[index] = False
        return index

    @around(batch, "swap_states")
    def swap_states(original: Callable[..., None], self: Any, i1: int, i2: int) -> None:
        mask = self.allowed_token_ids_mask_cpu_tensor
        swapped = None if mask is None else mask[[i2, i1]]  # a copy
        original(self, i1, i2)
        if swapped is not None:
            mask[[i1, i2]] = swapped


@repair("row-masks-ascend", f"{ASCEND_BATCH}:InputBatch.add_request .swap_states", until="0.23")
def install_ascend(module: ModuleType) -> None:
    """Same as row-masks, in vllm-ascend's worker."""
    from npu_gptoss.serving.compat.start.ascend import expect_release

    expect_release()
    install(module)
