"""One scheduler step for attention: its lengths on the host, or, for graphs, on the device only.

`AttentionMetadata` is any step: prefill, chunks and decode mixed, lengths as host integers. `DecodeMetadata` is a step
of decode whose lengths are read on the device at every run, so that a captured graph can be replayed as they grow.
Both are taken by `paged_attention` and `write_kv_cache`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from npu_gptoss.errors import InputError
from npu_gptoss.kernels import expect


@dataclass(frozen=True)
class AttentionMetadata:
    """Requests laid end to end over the rows of `query`; keys and values in a paged cache.

    Lengths are host integers, so that no kernel has to copy them from a device.

    query_start_loc: [requests + 1] first row of each request and, last, the number of real rows; starts at 0.
    seq_lens: [requests] keys that the last row of each request sees: cached and new ones.
    block_table: [requests, blocks] int32, the cache block of each `block_size` positions of a request.
    slot_mapping: [>= rows] int32 or int64, block * block_size + offset at which each new key and value is stored.
    positions: [>= rows] int64, where each row's token stands; for attention that turns queries and keys itself.
    lengths: [requests] int32 on the device, where only it knows how many keys a request of one row sees, and seq_lens
        has the most that it can be; of requests of more rows seq_lens is exact. Triton kernels take it.
    """

    query_start_loc: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    lengths: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    # Index tensors that a solution derives once per step and reuses in every layer, by its own key.
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        start, lengths = self.query_start_loc, self.seq_lens
        if not start or start[0] != 0 or len(start) != len(lengths) + 1:
            raise InputError(
                f"query_start_loc must start at 0 and have one entry more than seq_lens; got {len(start)} entries "
                f"for {len(lengths)} requests: {start[:8]}",
                field="query_start_loc",
            )
        for i, seq_len in enumerate(lengths):
            query_len = start[i + 1] - start[i]
            if not 0 <= query_len <= seq_len:
                raise InputError(
                    f"request {i} has {query_len} query rows and {seq_len} keys; expected 0 <= rows <= keys",
                    field="seq_lens",
                )
        if self.block_table.shape[0] < len(lengths):
            raise InputError(
                f"block_table has {self.block_table.shape[0]} rows for {len(lengths)} requests", field="block_table"
            )
        if self.slot_mapping.shape[0] < start[-1]:
            raise InputError(
                f"slot_mapping has {self.slot_mapping.shape[0]} entries for {start[-1]} rows", field="slot_mapping"
            )
        if self.lengths is not None:
            expect("lengths", self.lengths, len(lengths), dtype=torch.int32)

    @property
    def exact_seq_lens(self) -> tuple[int, ...]:
        """Returns seq_lens; with `lengths`, a copy of these from the device, for which the host waits."""
        if self.lengths is None:
            return self.seq_lens
        rows = (end - start for start, end in pairwise(self.query_start_loc))
        exact = zip(self.seq_lens, self.lengths.tolist(), rows, strict=True)
        return tuple(known if count == 1 else most for most, known, count in exact)

    @property
    def num_requests(self) -> int:
        return len(self.seq_lens)

    @property
    def num_tokens(self) -> int:
        """Real rows; later rows of query, key and value are padding."""
        return self.query_start_loc[-1]

    @functools.cached_property
    def max_query_len(self) -> int:
        return max((b - a for a, b in pairwise(self.query_start_loc)), default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens, default=0)


@dataclass(frozen=True)
class DecodeMetadata:
    """One row a request, with lengths in tensors of fixed address, for full decode graphs.

    Kernels read the tensors' contents on the device when they run; refresh them in place before a replay (or let the
    graph itself advance them). Fixed at capture: the number of rows, the width of the table and `max_seq_len`,
    from which launch grids and the number of splits follow; a split without keys returns at once.

    lengths: [rows] int32, keys that the row sees, its own included; 0 marks a padding row, whose result is zero and
        whose query may hold anything. Triton kernels cut lengths to max_seq_len and the table, so that a step which
        will be discarded reads nothing beyond.
    block_table: [rows, blocks] int32; its first ceil(length / block_size) entries of a row are read, no others.
    slot_mapping: [rows] int32 or int64, where the row's new key and value go; negative: nowhere.
    max_seq_len: the longest length of any replay. Smaller is a little faster; a capture for the model's context works.

    Lengths, table and all keys but each row's newest are there before the step's first projection begins: a kernel may
    read them while the one before it, which writes queries and newest keys, still runs.

    To solutions that know only `AttentionMetadata` it looks like one; its `seq_lens` copies the lengths to the host.
    That is right whenever it is allowed: inside a capture the device refuses it, and the capture fails.
    """

    lengths: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    max_seq_len: int

    def __post_init__(self) -> None:
        rows = self.lengths.shape[0]
        expect("lengths", self.lengths, "rows", dtype=torch.int32)
        if self.block_table.shape[0] < rows or self.slot_mapping.shape[0] < rows:
            raise InputError(
                f"{rows} rows need as many in block_table and slot_mapping, "
                f"got {self.block_table.shape[0]} and {self.slot_mapping.shape[0]}",
                field="block_table",
            )
        if self.max_seq_len < 1:
            raise InputError(f"max_seq_len must be at least 1, got {self.max_seq_len}", field="max_seq_len")

    @property
    def num_requests(self) -> int:
        return self.lengths.shape[0]

    @property
    def num_tokens(self) -> int:
        """All rows: which of them are padding is known to the device only."""
        return self.lengths.shape[0]

    @property
    def max_query_len(self) -> int:
        return 1

    @property
    def query_start_loc(self) -> tuple[int, ...]:
        return tuple(range(self.lengths.shape[0] + 1))

    @property
    def seq_lens(self) -> tuple[int, ...]:
        """The device's lengths; the host waits for them."""
        return tuple(self.lengths.tolist())

    exact_seq_lens = seq_lens

    @property
    def plans(self) -> dict[Any, Any]:
        """Always empty: a plan from host lengths would be stale at the next run."""
        return {}


StepMetadata = AttentionMetadata | DecodeMetadata
