"""lm_head once more in eight bits, with a bound on its error: half the bytes find the few tokens that can win.

A row w of lm_head is `step * q + error`, q in -127 ... 127. For a row h of the model's output

    |h . w  -  h . (step * q)|  <=  |h| |error|                                            (Cauchy-Schwarz)

so a token whose upper bound lies below another's lower bound is not the largest. What is left, some dozens of 201 088,
is multiplied in full. The same holds with noise added to both sides, as in sampling by Gumbel's noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

TOKENS, INPUTS = 128, 128  # a tile of the kernel: both sizes are padded with zeros to multiples of it
AT_ONCE = 16384  # rows of lm_head that are converted together
LARGEST = 127
# the sum of a product in float32, whatever its order, is off by less than this share of |h| |w|
ROUNDING = 2.0**-16


@dataclass(frozen=True)
class Shortlist:
    """rows [vocab, hidden] int8, padded; bounds [vocab, 4] float32: step, |error|, |w| + |error|, unused."""

    rows: torch.Tensor
    bounds: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor) -> Shortlist:
        """weight: [vocab, hidden]."""
        vocab, hidden = (-(-size // tile) * tile for size, tile in zip(weight.shape, (TOKENS, INPUTS), strict=True))
        rows = torch.zeros(vocab, hidden, dtype=torch.int8, device=weight.device)
        made = cls(rows, torch.zeros(vocab, 4, dtype=torch.float32, device=weight.device))
        made.write(weight)
        return made

    def write(self, weight: torch.Tensor) -> None:
        """Writes the shortlist of other weights, at the same addresses."""
        for first in range(0, len(weight), AT_ONCE):
            part = weight[first : first + AT_ONCE].float()
            step = (part.abs().amax(1, keepdim=True) / LARGEST).clamp(min=1e-30)
            whole = (part / step).round().clamp(-LARGEST, LARGEST)
            here = slice(first, first + len(part))
            self.rows[here, : part.shape[1]] = whole.to(torch.int8)
            norm = part.norm(dim=1)
            error = (part - whole * step).norm(dim=1) + ROUNDING * norm
            self.bounds[here] = torch.stack((step[:, 0], error, norm + error, torch.zeros_like(norm)), dim=1)
