"""Another package's attention kernels, found by their entry point: one is right, one has a window of 129 keys.

The folder is what an installed package looks like; with it on PYTHONPATH nothing has to be installed.
"""

from __future__ import annotations

import torch

from npu_gptoss.attention import StepMetadata, small_ops
from npu_gptoss.attention.operations import PAGED
from npu_gptoss.kernels import ANY, Priority, accepts, register_kernel


def right(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: StepMetadata,
    sinks: torch.Tensor,
    scale: float,
    sliding_window: int | None,
    out: torch.Tensor,
) -> None:
    """As small_ops."""
    small_ops.paged_attention(query, key_cache, value_cache, metadata, sinks, scale, sliding_window, out)


def wide_window(*, sliding_window: int | None, **arguments: object) -> None:
    """Keeps one key too many."""
    right(**arguments, sliding_window=sliding_window and sliding_window + 1)


def register() -> None:
    for name, function, priority in (("right", right, 1), ("wide_window", wide_window, 0)):
        register_kernel(
            PAGED,
            solution=f"their_{name}",
            signatures=(accepts(query="bfloat16", kv="bfloat16", sinks="bfloat16"),),
            traits={"head_dim": frozenset({64}), "block_size": frozenset({16}), "sliding_window": ANY},
            priority=Priority.PLUGIN + priority,
        )(function)
