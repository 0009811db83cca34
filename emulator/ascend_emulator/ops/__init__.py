"""The operators of an emulated 910B: contracts and mathematics on CPU tensors, importable without torch_npu."""

from __future__ import annotations

import importlib

from ascend_emulator.ops.table import OPS, SCHEMAS

# each module registers its operators when imported
FAMILIES = (
    "activation",
    "atb_attention",
    "cache",
    "fia",
    "formats",
    "grouped_matmul",
    "low_bit",
    "moe_combine",
    "moe_distribute",
    "moe_dispatch",
    "moe_gating",
    "norm",
    "rope",
    "simple",
    "traffic",
    "vllm_ascend",
)
for _family in FAMILIES:
    importlib.import_module(f"{__name__}.{_family}")

__all__ = ["OPS", "SCHEMAS"]
