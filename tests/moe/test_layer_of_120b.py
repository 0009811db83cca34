"""One layer of gpt-oss-120b at full size on the emulated 910B: packed experts against expanded ones, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend_emulator.launch import Machine

from emulator.tests import machine
from emulator.tests.test_triton import PACKAGES, needs_compiler
from npu_gptoss.model.memory import free_memory

pytestmark = [
    pytest.mark.emulated,
    pytest.mark.ascend_compiler,
    pytest.mark.slow,
    pytest.mark.long,
    needs_compiler,
]
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests/moe/layer_of_120b.py"
MEMORY = 16e9  # bytes, at the peak
SECONDS = 1500  # 150 on two idle cores, 310 on busy ones
# More than half of the time was page faults: an operator's memory is taken from the system anew, 4 KiB at a time.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """It takes MEMORY of this machine: 12 GB of the device, and an operator's copy."""
    if (free := free_memory() or MEMORY) < MEMORY:
        pytest.skip(f"the layer and an operator's copy take {MEMORY / 1e9:.0f} GB of memory, {free / 1e9:.1f} are free")
    file = tmp_path_factory.mktemp("layer") / "found.pt"
    run = machine.emulate(
        str(SCRIPT),
        str(file),
        machine=Machine(memory=12, triton=PACKAGES),
        timeout=SECONDS,
        PYTHONPATH=str(ROOT),
        NPU_GPTOSS_EXPERT_FORMAT="nd",
        **LARGE_PAGES,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return torch.load(file)


def test_packed_experts_give_the_bits_of_expanded_ones_at_full_size(found: Mapping[str, Any]) -> None:
    """1, 8 and 64 rows, which touch 4, 30 and 110 of the 128 experts."""
    for rows, packed in found["packed"].items():
        expanded = found["expanded"][rows]
        assert expanded.isfinite().all()
        assert expanded.float().std() > 1, "outputs of nothing would be equal, too"
        assert torch.equal(packed.view(torch.int16), expanded.view(torch.int16)), f"{rows} rows"


def test_the_experts_that_a_step_touches_are_expanded_and_no_others(found: Mapping[str, Any]) -> None:
    """The room was full of NaN before each step."""
    assert [len(experts) for experts in found["routed"].values()] == [4, 30, 110]
    for rows, experts in found["routed"].items():
        assert found["filled"][rows] == [experts, experts], f"{rows} rows, into gate and up, and down"


def test_one_scale_off_by_one_among_a_hundred_million_is_seen(found: Mapping[str, Any]) -> None:
    """Of the last group of the last column: one element of the sum is another."""
    changed = found["spoilt"] != found["packed"][1]
    assert changed.nonzero().tolist() == [[0, found["spoilt"].shape[1] - 1]]
