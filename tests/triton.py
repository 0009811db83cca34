"""Whether Triton kernels can be called here: on a GPU, or in Triton's interpreter on a CPU."""

from __future__ import annotations

import importlib.util
import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
TRITON_HERE = pytest.mark.skipif(
    not INTERPRETED or importlib.util.find_spec("triton") is None,
    reason="needs triton, which `make setup` installs, and no GPU; `make test-cuda` is for those",
)
