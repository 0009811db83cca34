"""Four and eight devices, as 120b wants them: shared as its tutorial says, and two replicas of two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import new_checkpoint
from tests.oracle import load_oracle
from tests.serving.emulated.conftest import of_oracle
from tests.serving.emulated.rounds import THREE_IN_A_BUCKET_OF_FOUR, VOCABULARY, right, turn

LAYOUTS: dict[str, dict[str, Any]] = {
    "TP=4": {"tensor_parallel_size": 4},
    "TP=8, experts in parallel": {"tensor_parallel_size": 8, "enable_expert_parallel": True},
    "DP=2, TP=2, experts in parallel": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "enable_expert_parallel": True,
    },
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As many key heads as the published models have."""
    return new_checkpoint(tmp_path_factory, vocab_size=VOCABULARY, kv_heads=8)


@pytest.fixture(scope="module")
def expected_of_wide(wide: Path) -> Any:
    return of_oracle(load_oracle(wide))


@pytest.mark.long  # of two devices, test_two_devices.py
@pytest.mark.parametrize("how", LAYOUTS)
def test_many_devices_equal_transformers_in_float32(how, serve, wide, expected_of_wide):
    rounds = [turn((5,), seed=3), turn((1, 2, 127, 128, 300)), turn(THREE_IN_A_BUCKET_OF_FOUR, seed=2)]
    # vLLM sets 4 GiB of the host aside for each device, which eight of them would not have here
    results, printed = serve(rounds, options={**LAYOUTS[how], "swap_space": 0}, model=wide)
    assert right(rounds, results, expected_of_wide) == [True, True, True]
    assert "mixed prefill-decode, PIECEWISE" in printed
