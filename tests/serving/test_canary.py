"""What the canary takes for a fault, and what for rounding: another batch size chooses other kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from npu_gptoss.serving.canary import FULL, Canary, Findings, Prompt, Watch

PROMPTS = [Prompt(number, 5, 8, ([number],), 1000) for number in range(4)]
BATCH, OTHER = [(prompt, 1) for prompt in PROMPTS], [(prompt, 1) for prompt in PROMPTS[1::-1]]


class Stepping(Canary):
    """Hidden states are one number a request: its prompt's, `noise` more in a small batch, `fault` more in replays."""

    def __init__(self, noise: float, fault: float) -> None:
        self.noise, self.fault, self.watch = noise, fault, Watch(mode=FULL, size=4)

    def _step(self, batch: Any, *, eager: bool = True, **more: Any) -> torch.Tensor:
        moved = self.noise * (len(batch) < len(PROMPTS)) + (0.0 if eager else self.fault)
        return torch.tensor([[10.0 * prompt.number + moved] for prompt, _ in batch])

    def _differences(self, want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
        return (got - want).abs()[:, 0]


@pytest.mark.parametrize(
    ("noise", "fault", "wrong", "unjudged"),
    [
        (0.0, 0.0, False, 0),
        (0.0, 0.2, False, 0),  # rounding of graphs that choose other kernels
        (0.0, 0.3, True, 0),
        (0.2, 0.3, False, 0),  # another batch size alone moves logits by 0.2
        (0.2, 0.65, True, 0),
        (0.3, 0.65, False, 1),  # a wrong context moves them by 0.7 at least: no longer told from rounding
        (0.3, float("nan"), True, 1),
    ],
)
def test_a_difference_is_a_fault_only_beyond_what_rounding_does(
    noise: float, fault: float, wrong: bool, unjudged: int
) -> None:
    found = Findings(context=0.7)
    Stepping(noise, fault)._compare(found, FULL, 4, BATCH, OTHER)
    assert (FULL in found.wrong, found.unjudged) == (wrong, unjudged)
    assert found.replayed == 1


def test_noise_is_that_of_the_same_requests_in_both_batches() -> None:
    """Requests stand in another order there, and one has other rows: it is another step."""
    canary = Stepping(0.2, 0.0)
    other = [(PROMPTS[3], 2), *OTHER]
    want = {id(BATCH): canary._step(BATCH), id(other): canary._step(other)}
    assert canary._noise(BATCH, other, want) == pytest.approx(0.2)
