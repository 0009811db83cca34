from __future__ import annotations

import pytest

from npu_gptoss.nominal import memory_bandwidth

SPEEDS = {
    **{"Ascend910B1": 1600, "Ascend910B2C": 1600, "Ascend910B3": 1600, "Ascend910B4": 800, "Ascend910B4-1": 1600},
    **{
        "Ascend910B40": 1600,
        "Ascend910_9391": 1600,
        "Ascend910_9589": None,
        "NVIDIA GeForce RTX 4090": None,
        "NVIDIA H200": 4800,
    },
    **{"NVIDIA H100 80GB HBM3": 3350, "NVIDIA H100 PCIe": 2000, "NVIDIA A100-SXM4-40GB": 1555},
}


@pytest.mark.parametrize(("name", "speed"), SPEEDS.items())
def test_the_bandwidth_belongs_to_the_exact_chip(name: str, speed: int | None) -> None:
    assert memory_bandwidth(name) == speed
