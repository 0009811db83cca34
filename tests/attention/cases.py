"""Steps of mixed requests over a paged cache, as attention sees them, and the check that every kernel must pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from npu_gptoss.attention import paged_attention
from npu_gptoss.verify import attention_cases
from npu_gptoss.verify.attention_cases import Shape
from tests.tolerances import assert_close

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, SCALE = 8, 2, 64, 16, 64**-0.5


class Step(attention_cases.Step):
    def run(self, **changes: object) -> torch.Tensor:
        return paged_attention(**{**self.inputs(None), **changes})


def make_step(
    requests: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    seed: int = 0,
    shape: Shape | None = None,
    device: str = "cpu",
) -> Step:
    """The steps of `npu-gptoss verify` (`npu_gptoss/verify/attention_cases.py`), in one dtype."""
    shape = shape or Shape(block_size=BLOCK_SIZE)  # which a test may have changed
    drawn = attention_cases.make_step(requests, shape, torch.Generator().manual_seed(seed), padding).to(device, dtype)
    return Step(**{f.name: getattr(drawn, f.name) for f in dataclasses.fields(drawn)})


def in_one_tensor(key_cache: torch.Tensor, value_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the caches as the halves of [blocks, block_size, kv_heads, 2 * head_dim], as vLLM 0.33 has them."""
    keys, values = torch.cat((key_cache, value_cache), -1).split(key_cache.shape[-1], -1)
    return keys, values


def interleaved(step: Step) -> Step:
    keys, values = in_one_tensor(step.key_cache, step.value_cache)
    return dataclasses.replace(step, key_cache=keys, value_cache=values)


def check(
    run: Callable[..., torch.Tensor], step: Step, sliding_window: int | None, *, rounded_weights: bool = False
) -> None:
    """Raises AssertionError when `run(step, sliding_window)` differs from the reference for the same inputs.

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
