"""Pad and unpad shims: a graph replayed at a bucketed size hands over more rows than are real. And padding of sinks.

Padded rows hold undefined values, NaN included. Kernels see the real rows only, and the tail of the result is
zero, so that nothing of it reaches a router or, times a zero weight, an expert sum (0 * NaN is NaN).
"""

from __future__ import annotations

import torch

from npu_gptoss.errors import InputError

SINK_SLACK = 32


def with_slack(sinks: torch.Tensor) -> torch.Tensor:
    """A copy of a layer's sinks [heads] with 32 elements of memory behind it.

    CANN 8.5 to 9.0.1 reads 16 from the first of each group of 8 on, the last ones past the end (ops-transformer
    ca4633c9b). They count for nothing, but where the memory ends there the card reports a fault.
    """
    return torch.cat((sinks, sinks.new_zeros(SINK_SLACK)))[: len(sinks)]


def unpad(rows: torch.Tensor, num_tokens: int, name: str = "rows") -> torch.Tensor:
    """The first `num_tokens` rows, as a view; `rows` itself when it has no more."""
    if rows.shape[0] < num_tokens:
        raise InputError(f"{name} has {rows.shape[0]} rows for {num_tokens} tokens", field=name)
    return rows if rows.shape[0] == num_tokens else rows[:num_tokens]  # a slice costs the host a microsecond or more


def zero_tail(out: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Zeroes the rows from `num_tokens` on, in place; returns `out`."""
    if out.shape[0] > num_tokens:
        out[num_tokens:].zero_()
    return out
