"""The sliding window, converted in one place.

The model card's window of 128 keeps 128 keys *including* the query's own position: a query at position i sees the keys
i - 127 … i. Operators count differently (Ascend's `pre_tokens` and FlashAttention's left window count the keys *before*
the query, upstream ports passed 128 and kept 129 keys), so nothing but this module may turn one into the other.
"""

from __future__ import annotations

from npu_gptoss.errors import InputError


def keys_before(sliding_window: int | None) -> int | None:
    """Number of keys before its own position that a query sees: 127 for a window of 128; None: all."""
    if sliding_window is None:
        return None
    if sliding_window < 1:
        raise InputError(
            f"a sliding window keeps at least the query's own key, got {sliding_window}; full attention is None",
            field="sliding_window",
        )
    return sliding_window - 1


def first_visible(position: int, before: int | None) -> int:
    """The oldest position that a query at `position` sees, with `before` from `keys_before`."""
    return 0 if before is None else max(0, position - before)
