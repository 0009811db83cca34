"""What one scheduler step looks like to attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from npu_gptoss.errors import InputError


@dataclass(frozen=True)
class AttentionMetadata:
    """Requests laid end to end over the rows of `query`; keys and values in a paged cache.

    Lengths are host integers, so that no kernel has to copy them from a device.

    query_start_loc: [requests + 1] first row of each request and, last, the number of real rows; starts at 0.
    seq_lens: [requests] keys that the last row of each request sees: what is cached plus what is new.
    block_table: [requests, blocks] int32, the cache block of each `block_size` positions of a request.
    slot_mapping: [>= rows] int32 or int64, block * block_size + offset at which each new key and value is stored.
    """

    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    # Index tensors that a solution derives once per step and reuses in every layer, by its own key.
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        start, lengths = self.query_start_loc, self.seq_lens
        if not start or start[0] != 0 or len(start) != len(lengths) + 1:
            raise InputError(
                f"query_start_loc must start at 0 and have one entry more than seq_lens; got {len(start)} entries "
                f"for {len(lengths)} requests: {start[:8]}"
            )
        for i, seq_len in enumerate(lengths):
            query_len = start[i + 1] - start[i]
            if not 0 <= query_len <= seq_len:
                raise InputError(
                    f"request {i} has {query_len} query rows and {seq_len} keys; expected 0 <= rows <= keys"
                )
        if self.block_table.shape[0] < len(lengths):
            raise InputError(f"block_table has {self.block_table.shape[0]} rows for {len(lengths)} requests")
        if self.slot_mapping.shape[0] < start[-1]:
            raise InputError(f"slot_mapping has {self.slot_mapping.shape[0]} entries for {start[-1]} rows")

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Real rows; whatever follows them in query, key and value is padding."""
        return self.query_start_loc[-1]

    @property
    def max_query_len(self) -> int:
        return max((b - a for a, b in pairwise(self.query_start_loc)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)
