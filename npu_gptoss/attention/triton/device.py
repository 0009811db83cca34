"""Device code of all attention kernels: products, and one step of the online softmax.

Scores are kept in base 2: exp(s) = 2^(s * log2 e), with log2 e folded into the scale, because the hardware has exp2.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(a, b, WIDE: tl.constexpr):
    """a @ b in fp32. WIDE: in fp32 throughout (fp32 inputs; and the interpreter, which cannot multiply bfloat16)."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def softmax_step(
    scores, scale, value, total, largest, denominator, DTYPE: tl.constexpr, WIDE: tl.constexpr, LIFT: tl.constexpr = 1.0
):
    """Takes [M, N] unscaled scores (hidden ones -inf; scale > 0) and [N, D] values into the running sums.

    LIFT: a factor of the values' sum: weights are multiplied by it before they are rounded.
    """
    new = tl.maximum(largest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - new[:, None])
    shrink = tl.exp2(largest - new)
    denominator = denominator * shrink + tl.sum(weights, 1)
    total = total * shrink[:, None]
    total += product((weights * LIFT).to(DTYPE), value, WIDE)
    return total, new, denominator
