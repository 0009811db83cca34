"""What one self-test gave, how it is judged, and the memory that it starts from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

LIMIT = 0.02  # of the worst row, relative to the largest; bfloat16 rounds up to 0.8 %, every defect makes 10 % and more


@dataclass(frozen=True)
class Outcome:
    """What was computed, whose defect a wrong result shows, and how far off it is. problem: empty when right.

    merged_heads: only heads 1.. of each group are wrong, of requests of one row.
    """

    what: str
    suspect: str
    deviation: float
    problem: str
    merged_heads: bool = False

    def sentence(self) -> str:
        return f"{self.what}: {self.problem}; suspect: {self.suspect}"


def deviation(got: torch.Tensor, want: torch.Tensor) -> float:
    """Of the worst row, relative to the largest row of `want`; infinite for NaN and Inf. Both [rows, …]."""
    got, want = got.float().flatten(1), want.float().flatten(1)
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got - want).norm(dim=1).max() / want.norm(dim=1).max().clamp(min=1e-30))


def judged(what: str, suspect: str, deviation: float, limit: float = LIMIT) -> Outcome:
    problem = "NaN or Inf" if deviation == float("inf") else f"{deviation:.0%} from the definition"
    return Outcome(what, suspect, deviation, problem if deviation > limit else "")


def compared(
    what: str, suspect: str, run: Callable[[], Sequence[torch.Tensor]], wants: Sequence[torch.Tensor], repeats: int = 1
) -> Outcome:
    """What `run` computes on the device against what the definition says, each [rows, …]; then `repeated`."""
    got = run()
    found = max(deviation(*pair) for pair in zip(got, wants, strict=True))
    return repeated(judged(what, suspect, found), repeats, run, got)


def repeated(
    outcome: Outcome, repeats: int, run: Callable[[], Sequence[torch.Tensor]], got: Sequence[torch.Tensor]
) -> Outcome:
    """What is right is computed `repeats` times in all, and has to give the same bits."""
    for repeat in range(1, repeats if not outcome.problem else 0):
        if not all(map(torch.equal, run(), got)):
            return replace(outcome, problem=f"call {repeat + 1} of the same inputs gave other bits than the first")
    return outcome


def poison(device: torch.device) -> None:
    """Leaves NaN in memory that the next results will lie in, in blocks of both sizes that the allocator keeps."""
    for count, size in ((1, 64 << 20), (32, 512 << 10)):
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(count)]
        del blocks
