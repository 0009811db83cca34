"""gpt-oss by our plugin on vllm-ascend 0.23.0 and the emulated CANN 9.1, against transformers in float32."""

from __future__ import annotations

import re

import pytest

from tests.serving.emulated.rounds import EAGER, right
from tests.serving.emulated.test_modes import ORDINARY

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("mode", ["eager"])
def test_every_mode_equals_transformers_in_float32(mode, serve_9_1, expected):
    results, printed = serve_9_1(ORDINARY, options=EAGER)
    assert right(ORDINARY, results, expected) == [True] * len(ORDINARY)
    assert not re.findall(r"Warning: .*\[R\d\d\]", printed), "a rule was broken that no card complains about"
