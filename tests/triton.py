"""Skip marks for Triton kernels, which run on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from npu_gptoss.kernels import HOPPER, current_platform

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
TRITON_HERE = pytest.mark.skipif(
    not INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="needs triton, which `make setup` installs, and no GPU; `make test-cuda` is for those",
)
if INTERPRETED and importlib.util.find_spec("triton") is not None:
    from tests import addresses  # noqa: F401  each address is checked
if torch.cuda.is_available():
    torch.cuda.init()  # from here on its architecture is known
ON_HOPPER = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(HOPPER.reasons_against(current_platform())),
        reason="needs a GPU of compute capability 9.0 and a Triton release that the Gluon kernels were seen with",
    ),
]
