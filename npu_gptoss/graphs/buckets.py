"""At which sizes graphs are captured, and which of them a step takes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from npu_gptoss.errors import InputError

STEP = 8  # between sizes, as vLLM has it


def capture_sizes(max_requests: int) -> list[int]:
    """1, 2, 4, then multiples of 8, and the largest decode step itself: every size that a step can need.

    A step of decode has one row a request, so nothing above `max_requests` is ever replayed.
    """
    if max_requests < 1:
        raise InputError(f"graphs are captured for at least one request, got {max_requests}", field="max_requests")
    return sorted(
        {size for size in (1, 2, 4, *range(STEP, max_requests, STEP)) if size < max_requests} | {max_requests}
    )


def checked_sizes(sizes: Iterable[int]) -> tuple[int, ...]:
    """Sizes that a user chose: ascending, each once. Raises InputError for none, and for one below 1."""
    chosen = tuple(sorted(set(sizes)))
    if not chosen or chosen[0] < 1:
        raise InputError(
            f"capture sizes must be whole numbers from 1, got {list(chosen) or 'none'}", field="capture_sizes"
        )
    return chosen


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` (ascending) that holds `rows`; None: no graph is that large."""
    at = bisect_left(sizes, rows)
    return sizes[at] if at < len(sizes) else None
