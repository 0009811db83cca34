"""Slots of a decode step's tokens in a tile of sixteen, not of 1024 (vllm-ascend 0.23)."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from npu_gptoss.serving.compat.patch import Original, around, expect_source, repair

if TYPE_CHECKING:
    import torch

TILE = 16
KERNEL = "_compute_slot_mapping_kernel"


@repair(
    "ascend-slots",
    "vllm_ascend.worker.block_table:BlockTable.compute_slot_mapping",
    releases="0.23",
    upstream="vllm-ascend PR 13048",
    until="0.33",
)
def install_slots(module: ModuleType) -> None:
    """vLLM's kernel works on 1024 tokens of each request, one after the other on Ascend's scalar unit, where a decode
    step has one to six: 173 us a launch and cache group on a card, of some milliseconds a step."""
    table = module.BlockTable
    expect_source(
        table.compute_slot_mapping,
        f"{KERNEL}[(num_reqs + 1,)]( num_tokens, self.max_num_batched_tokens, query_start_loc, positions, "
        "self.block_table.gpu, self.block_table.gpu.stride(0), self.block_size, self.slot_mapping.gpu, "
        "TOTAL_CP_WORLD_SIZE=total_cp_world_size, TOTAL_CP_RANK=total_cp_rank, "
        "CP_KV_CACHE_INTERLEAVE_SIZE=self.cp_kv_cache_interleave_size, PAD_ID=PAD_SLOT_ID, BLOCK_SIZE=1024, )",
    )

    @around(table, "compute_slot_mapping")
    def compute_slot_mapping(
        original: Original, self: Any, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        tokens = len(positions)
        if tokens > TILE * num_reqs or self.pcp_world_size * self.dcp_world_size > 1:
            original(self, num_reqs, query_start_loc, positions)
            return
        slots, blocks = self.slot_mapping.gpu, self.block_table.gpu
        # the kernel's last program would write what is behind the tokens sixteen at a time
        slots[tokens : self.max_num_batched_tokens].fill_(module.PAD_SLOT_ID)
        getattr(module, KERNEL)[(num_reqs + 1,)](
            *(tokens, tokens, query_start_loc, positions, blocks, blocks.stride(0), self.block_size, slots),
            TOTAL_CP_WORLD_SIZE=1,
            TOTAL_CP_RANK=0,
            CP_KV_CACHE_INTERLEAVE_SIZE=self.cp_kv_cache_interleave_size,
            PAD_ID=module.PAD_SLOT_ID,
            BLOCK_SIZE=TILE,
        )
