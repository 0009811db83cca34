"""Comparison with the fp32 reference: `|got - want| <= atol + rtol * |want|`; NaN and Inf always fail.

The numbers and their reasons are in `npu_gptoss/verify/tolerances.py`; a test with a wider tolerance gives a reason.
"""

from __future__ import annotations

import torch

from npu_gptoss.verify.compare import compare
from npu_gptoss.verify.tolerances import TOLERANCES, Tolerance


def assert_close(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None, *, scale: float = 1.0, atol: float = 0.0
) -> None:
    """Compares in fp32. `dtype` picks the tolerance (default: `got`'s).

    scale widens both terms, atol raises the absolute one; each needs a reason at the call.
    """
    absolute, rtol = TOLERANCES[dtype or got.dtype]
    limit = Tolerance(max(absolute, atol), rtol, scale)
    verdict = compare({"result": got.float()}, {"result": want.float()}, {"result": limit})
    assert verdict.ok, "\n".join(verdict.lines())
