"""Two greedy answers to one prompt that part: was it at a near-tie?

On a GPU a row that is computed among others has its sums in another order, and bfloat16 rounds them; docs/numerics.md.
"""

from __future__ import annotations

from collections.abc import Sequence

from npu_gptoss.engine import Engine

NEAR = 0.5  # of log-probability in fp32; a token of a wrong computation loses about 3


def regret(exact: Engine, prompt: Sequence[int], ours: Sequence[int], theirs: Sequence[int]) -> float | None:
    """By how much `exact`, in fp32 on the CPU, prefers the better of the two tokens with which the answers part, in
    log-probability; None where neither has a token that the other contradicts: they are equal, or one is cut off."""
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            logits = exact.logits([*prompt, *ours[:place]])[-1]
            return float((logits[one] - logits[other]).abs())
    return None
