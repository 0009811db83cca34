"""The operators of an emulated 910B: contracts and mathematics on CPU tensors, importable without torch_npu."""

from __future__ import annotations

import importlib

from npu_gptoss.emulator.ops.table import OPS, SCHEMAS

FAMILIES = ("fia",)
for _family in FAMILIES:
    importlib.import_module(f"npu_gptoss.emulator.ops.{_family}")

__all__ = ["OPS", "SCHEMAS"]
