"""The check of addresses sees a kernel that leaves its tensors, and lets one that stays within them pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.triton import TRITON_HERE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

pytestmark = TRITON_HERE


@triton.jit
def moved(x, out, count, by, WRITES: tl.constexpr, ADDS: tl.constexpr):
    at = tl.arange(0, 16)
    mask = at < count
    values = tl.load(x + at + (0 if WRITES else by), mask=mask, other=0.0)
    if ADDS:
        tl.atomic_add(out + at + by, values, mask=mask)
    else:
        tl.store(out + at + (by if WRITES else 0), values, mask=mask)


@pytest.mark.parametrize("how", [{"WRITES": False, "ADDS": False}, {"WRITES": True, "ADDS": False}, {"ADDS": True}])
@pytest.mark.parametrize("by", [-1, 1])
def test_one_element_too_many_is_seen_and_not_with_its_mask(how: dict[str, Any], by: int) -> None:
    """The memory before and behind the tensors is there: it belongs to the same storage."""
    memory = torch.zeros(64)
    x, out = memory[8:24], memory[32:48]
    how = {"WRITES": True, **how}
    moved[(1,)](x, out, 16, 0, **how)
    moved[(1,)](x, out[:8], 8, 0, **how)
    with pytest.raises(Exception, match="within no tensor"):
        moved[(1,)](x, out, 16, by, **how)
