"""What the tests of the experts' Gluon kernels for Hopper share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npu_gptoss.moe import Mxfp4Experts
from tests.moe.test_triton import Call, make_call
from tests.triton import ON_HOPPER

__all__ = ["ON_HOPPER", "grouped_call", "with_tiles"]


@contextmanager
def with_tiles(monkeypatch: pytest.MonkeyPatch, chooser: str, shape: Any) -> Iterator[None]:
    """`launches.<chooser>` is `shape` for any number of tokens. New memory is NaN."""
    from npu_gptoss.moe.triton import launches

    monkeypatch.setattr(launches, chooser, shape)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def grouped_call(weights: Mxfp4Experts, groups: tuple[int, ...]) -> Call:
    """Each expert has as many slots as its group says, in mixed order; one expert a token."""
    call = make_call(weights, sum(groups), top_k=1)
    ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(3))
    call.topk_ids = ids[order][:, None].cuda()
    call.topk_weights = torch.rand(len(ids), 1, device="cuda") + 0.5
    return call
