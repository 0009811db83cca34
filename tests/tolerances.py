"""Comparison with the fp32 reference: `|got - want| <= atol + rtol * |want|`; NaN and Inf always fail.

The numbers and their reasons are in `npu_gptoss/verify/tolerances.py`; a test with a wider tolerance gives a reason.
"""

from __future__ import annotations

import torch

from npu_gptoss.verify.tolerances import TOLERANCES


def assert_close(
    got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype | None = None, *, scale: float = 1.0, atol: float = 0.0
) -> None:
    """Compares in fp32. `dtype` picks the tolerance (default: `got`'s).

    scale widens both terms, atol raises the absolute one; each needs a reason at the call.
    """
    absolute, rtol = TOLERANCES[dtype or got.dtype]
    got, want = got.float(), want.float()
    assert got.shape == want.shape, f"shape {tuple(got.shape)}, expected {tuple(want.shape)}"
    assert torch.isfinite(got).all(), f"{int((~torch.isfinite(got)).sum())} of {got.numel()} values are not finite"
    excess = (got - want).abs() - scale * (max(absolute, atol) + rtol * want.abs())
    if (excess > 0).any():
        worst = excess.flatten().topk(min(5, excess.numel())).indices
        where = [tuple(int(i) for i in torch.unravel_index(w, got.shape)) for w in worst]
        lines = "\n".join(f"  {at}: got {got[at]:.7g}, want {want[at]:.7g}" for at in where)
        raise AssertionError(f"{int((excess > 0).sum())} of {got.numel()} values differ; the worst:\n{lines}")
