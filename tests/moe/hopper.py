"""What the tests of the experts' Gluon kernels for Hopper share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from npu_gptoss.kernels import platform_override
from npu_gptoss.moe import Mxfp4Experts
from tests.moe.test_triton import Call, make_call

NEEDS_A_GPU = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@contextmanager
def only_gluon(monkeypatch: pytest.MonkeyPatch, chooser: str, shape: Any, triton_module: str) -> Iterator[None]:
    """`launches.<chooser>` is `shape` for any number of tokens, and Triton's kernels of the same path cannot be called.
    New memory is NaN."""
    from npu_gptoss.kernels.triton_launch import has_hopper
    from npu_gptoss.moe.triton import launches

    if not has_hopper(0):
        pytest.skip("the Gluon kernels need a GPU of compute capability 9.0 and a Triton that they were seen with")
    monkeypatch.setattr(launches, chooser, shape)
    monkeypatch.setattr(getattr(launches, triton_module), "gate_up", None)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with platform_override("cuda", frozenset({"triton"})):
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
