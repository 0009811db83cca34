"""Compiled graphs that an earlier start left in vLLM's cache."""

from __future__ import annotations

import pytest

from emulator.tests.test_triton import PACKAGES
from tests.serving.emulated.rounds import LENGTHS, PIECEWISE, right, turn


@pytest.mark.skipif(not PACKAGES.is_dir(), reason="the compiler is not set up: make setup-ascend-compiler")
def test_a_graph_of_another_rotation_is_not_taken_from_the_cache(serve_9_1, expected):
    """One passes queries as they are to the launch that rotates them; the other rotates them in the graph."""
    rounds = [turn(LENGTHS)]
    for kernel in ("triton_ascend", "small_ops"):
        results, _ = serve_9_1(rounds, options=PIECEWISE, variables={"NPU_GPTOSS_KERNEL_DENSE_ROTATE_WRITE": kernel})
        assert right(rounds, results, expected) == [True]
