"""Rotary position embedding of heads; the angles are `model/rope.py`'s."""

from __future__ import annotations

import torch


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates each head; dimension i pairs with i + head_dim / 2 ("neox" halves).

    Args:
        x: `[tokens, heads, head_dim]`.
        cos, sin: `[tokens, head_dim / 2]`, the tables' rows for the tokens' positions.

    Returns a new tensor like x. With float32 tables it is computed in float32 and rounded once, at the end.
    """
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
