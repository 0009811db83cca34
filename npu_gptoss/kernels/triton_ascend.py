"""What kernels in Triton for Ascend ask of the card. Does not import triton."""

from __future__ import annotations

import functools

import torch

PROGRAMS_WITHOUT_A_CARD = 3  # so that each goes round more than once


@functools.cache
def vector_cores(device: torch.device) -> int:
    """Returns the number of the card's vector cores: the fixed grid, whatever a step touches."""
    if device.type != "npu":
        return PROGRAMS_WITHOUT_A_CARD
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index)["num_vectorcore"]
