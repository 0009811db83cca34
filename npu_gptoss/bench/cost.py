"""What a million tokens costs at a stated price of one GPU hour."""

from __future__ import annotations

from npu_gptoss.errors import InputError


def dollars_per_million(tokens: float, seconds: float, price_per_hour: float) -> float:
    """`tokens` in `seconds` on a machine at `price_per_hour` dollars -> dollars a million tokens.

    In decode the tokens are those generated, in prefill those of the prompt.
    """
    if tokens <= 0 or seconds <= 0 or price_per_hour < 0:
        raise InputError(
            f"a price needs tokens and seconds above 0 and a price from 0, got {tokens}, {seconds}, {price_per_hour}"
        )
    return price_per_hour / 3600 * seconds / tokens * 1e6
