from __future__ import annotations

import pytest

from npu_gptoss.attention.window import first_visible, keys_before
from tests.refused import refused


def test_a_window_of_128_looks_127_keys_back():
    """Upstream ports passed 128 as the operator's pre_tokens and kept 129 keys."""
    assert keys_before(128) == 127
    assert keys_before(1) == 0
    assert keys_before(None) is None


def test_first_visible_key():
    assert [first_visible(p, 127) for p in (0, 127, 128, 500)] == [0, 0, 1, 373]
    assert first_visible(500, None) == 0


@pytest.mark.parametrize("window", [0, -1])
def test_no_window_is_none_not_zero(window):
    with refused("sliding_window"):
        keys_before(window)
