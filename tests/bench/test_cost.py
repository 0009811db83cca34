from __future__ import annotations

import pytest

from npu_gptoss.bench.cost import dollars_per_million
from npu_gptoss.errors import InputError


def test_a_million_tokens_in_an_hour_cost_the_hour():
    assert dollars_per_million(1_000_000, 3600, 3.0) == pytest.approx(3.0)


def test_a_decode_step_is_priced_by_the_tokens_of_its_whole_batch():
    # 32 tokens every 4 ms are 8 000 a second, 28.8 million an hour
    assert dollars_per_million(32, 4e-3, 2.88) == pytest.approx(0.1)


@pytest.mark.parametrize("arguments", [(0, 1, 1), (1, 0, 1), (1, 1, -1)])
def test_what_has_no_price_is_refused(arguments):
    with pytest.raises(InputError, match="a price needs tokens and seconds above 0"):
        dollars_per_million(*arguments)
