"""What one self-test of experts, projections or norms gave, and the memory that it starts from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

LIMIT = 0.02  # of the worst row, relative to the largest; bfloat16 rounds up to 0.8 %, every defect makes 10 % and more


@dataclass(frozen=True)
class Outcome:
    """What was computed, whose defect a wrong result shows, and how far off it is. problem: empty when right."""

    what: str
    suspect: str
    deviation: float
    problem: str

    def sentence(self) -> str:
        return f"{self.what}: {self.problem}; suspect: {self.suspect}"


def judged(what: str, suspect: str, deviation: float) -> Outcome:
    problem = "NaN or Inf" if deviation == float("inf") else f"{deviation:.0%} from the definition"
    return Outcome(what, suspect, deviation, problem if deviation > LIMIT else "")


def poison(device: torch.device) -> None:
    """Leaves NaN in memory that the next results will lie in, in blocks of both sizes that the allocator keeps."""
    for count, size in ((1, 64 << 20), (32, 512 << 10)):
        blocks = [torch.full((size // 4,), float("nan"), device=device) for _ in range(count)]
        del blocks
