"""What stock vllm-ascend 0.23.0 makes of gpt-oss, without our plugin: right, but that a window has 129 keys.

Its numbers are those of transformers with a window of 129 to 1e-4 in float32, so sinks, YaRN, biases and activation are
right, and the window is the one thing that is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.oracle import load_oracle
from tests.serving.emulated.conftest import of_oracle
from tests.serving.emulated.rounds import EAGER, TOLERANCE, errors, turn, worst

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

WITHIN, BEYOND = turn((1, 5, 100)), turn((129, 300))
SIZES = {"cudagraph_capture_sizes": [8, 4, 2, 1]}  # vllm-ascend 0.23 would capture 83
PIECEWISE = {"compilation_config": {"cudagraph_mode": "PIECEWISE", **SIZES}}
FULL = {"compilation_config": {"cudagraph_mode": "FULL_DECODE_ONLY", **SIZES}}


@pytest.fixture(scope="module")
def with_129(checkpoint: Path) -> Any:
    model = load_oracle(checkpoint)
    for layer in model.model.layers:
        layer.self_attn.sliding_window = layer.self_attn.sliding_window and 129
    model.config.sliding_window = 129
    return of_oracle(model)


# with graphs a padded row holds what lay in memory, and the router of NaN is undefined [R58]: strict mode refuses it
MODES = {
    "eager": {"options": EAGER},
    "piecewise": {"options": PIECEWISE, "machine": {"strict": False}},
    "full decode graphs": {"options": FULL, "machine": {"strict": False}},
}


@pytest.mark.parametrize("mode", MODES)
def test_stock_sees_129_keys_and_is_right_in_all_else(mode, serve_stock_9_1, expected, with_129):
    rounds = [WITHIN, BEYOND]
    results, _ = serve_stock_9_1(rounds, **MODES[mode])
    within, beyond = (worst(of_round) for of_round in errors(rounds, results, expected))
    assert within < TOLERANCE
    assert beyond > 10 * TOLERANCE
    assert worst(errors([BEYOND], results[1:], with_129)[0]) < TOLERANCE
