"""Steps of mixed requests over a paged cache, as attention sees them, and the check that every kernel must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from npu_gptoss.attention import StepMetadata, paged_attention
from npu_gptoss.verify.steps import GPT_OSS, STEPS, WINDOW, Shape, as_decode, step_tensors
from tests.tolerances import assert_close

__all__ = ["GPT_OSS", "STEPS", "WINDOW", "Shape", "Step", "as_decode", "check", "make_step"]

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 8, 2, 64, 16, 64**-0.5


@dataclass
class Step:
    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    metadata: StepMetadata
    sinks: torch.Tensor

    def run(self, **changes: object) -> torch.Tensor:
        arguments = {"scale": SCALE, "sliding_window": None, **changes}
        sinks = arguments.pop("sinks", self.sinks)
        return paged_attention(self.query, self.key_cache, self.value_cache, self.metadata, sinks, **arguments)


def make_step(
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
    shape: Shape | None = None,
    device: str = "cpu",
) -> Step:
    """The steps of `npu-gptoss verify` (`npu_gptoss/verify/steps.py`), in one dtype."""
    shape = shape or Shape(block_size=BLOCK_SIZE)  # which a test may have changed
    drawn = step_tensors(requests, shape, torch.Generator().manual_seed(seed), padding)
    floats = {
        f.name: getattr(drawn, f.name).to(device, dtype) for f in dataclasses.fields(drawn) if f.name != "metadata"
    }
    known = drawn.metadata
    table, slots = known.block_table.to(device), known.slot_mapping.to(device)
    return Step(**floats, metadata=dataclasses.replace(known, block_table=table, slot_mapping=slots, plans={}))


def check(
    run: Callable[..., torch.Tensor], step: Step, sliding_window: int | None, *, rounded_weights: bool = False
) -> None:
    """Raises AssertionError when `run(step, sliding_window)` is not what the reference makes of the same inputs.

    rounded_weights: the kernel multiplies values by weights rounded to bfloat16, as the tensor cores take them. Each
    product is then off by up to 2^-9 of itself however much the products cancel, so 2^-9 of the sum of their sizes,
    which is the same attention over absolute values.
    """
    want = step.run(sliding_window=sliding_window, kernel="reference")
    slack = 0.0
    if rounded_weights and step.query.dtype == torch.bfloat16:
        sizes = dataclasses.replace(step, value_cache=step.value_cache.abs())
        slack = 2**-9 * float(sizes.run(sliding_window=sliding_window, kernel="reference").max())
    assert_close(run(step, sliding_window), want, step.query.dtype, atol=slack)
