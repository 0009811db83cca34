"""The inputs of a decode step in tensors that stay where they are.

Row i is one request. Rows from `count` on pad the bucket: token 0 at position 0, no keys (seq_len 0), no slot (-1),
and a row of zeros in the block table. Whatever reads a padding row finds zeros, never what an earlier step left there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from npu_gptoss.errors import InputError

PADDING_SLOT = -1


@dataclass(frozen=True)
class DecodeState:
    """For up to `capacity` requests of up to `blocks` cache blocks each.

    ints: [3, capacity] int64: input ids, positions, slots. One tensor, so that one copy fills them.
    seq_lens: [capacity] int32, keys that the row's token sees, its own included.
    block_table: [capacity, blocks] int32.
    tokens: [capacity] int64, what the step chose; -1: its logits were not finite.
    """

    ints: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    tokens: torch.Tensor
    block_size: int

    @classmethod
    def allocate(cls, capacity: int, blocks: int, block_size: int, device: torch.device) -> DecodeState:
        ints = torch.zeros(3, capacity, dtype=torch.int64, device=device)
        ints[2] = PADDING_SLOT
        return cls(
            ints=ints,
            seq_lens=torch.zeros(capacity, dtype=torch.int32, device=device),
            block_table=torch.zeros(capacity, blocks, dtype=torch.int32, device=device),
            tokens=torch.zeros(capacity, dtype=torch.int64, device=device),
            block_size=block_size,
        )

    @property
    def capacity(self) -> int:
        return self.ints.shape[1]

    def rows(self, count: int) -> DecodeState:
        """The first `count` rows, as views: what a graph of that size captures."""
        return DecodeState(
            self.ints[:, :count], self.seq_lens[:count], self.block_table[:count], self.tokens[:count], self.block_size
        )

    @property
    def input_ids(self) -> torch.Tensor:
        return self.ints[0]

    @property
    def positions(self) -> torch.Tensor:
        return self.ints[1]

    @property
    def slots(self) -> torch.Tensor:
        return self.ints[2]

    def load(self, token_ids: Sequence[int], positions: Sequence[int], tables: Sequence[Sequence[int]]) -> None:
        """Fills one row a request and zeroes the rest: the next token of each, where it stands, and its blocks."""
        count = len(token_ids)
        if not len(positions) == len(tables) == count <= self.capacity:
            raise InputError(
                f"a decode step takes up to {self.capacity} requests with a token, a position and a table each, "
                f"got {count}, {len(positions)} and {len(tables)}"
            )
        where = np.asarray(positions, dtype=np.int64)
        ints = np.zeros((3, self.capacity), dtype=np.int64)
        ints[0, :count], ints[1, :count], ints[2] = token_ids, where, PADDING_SLOT
        width = max((len(table) for table in tables), default=0)
        table = np.zeros((self.capacity, width), dtype=np.int32)
        for row, blocks in zip(table, tables, strict=False):
            row[: len(blocks)] = blocks
        if count:
            ints[2, :count] = table[np.arange(count), where // self.block_size].astype(np.int64) * self.block_size
            ints[2, :count] += where % self.block_size
        lengths = np.zeros(self.capacity, dtype=np.int32)
        lengths[:count] = where + 1
        _copy(self.ints, ints)
        _copy(self.seq_lens, lengths)
        # Columns behind the longest table may hold blocks of an earlier step: no row's length reaches them.
        _copy(self.block_table[:, :width], table)

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(row, index, block) each: requests that grew into a new block since `load`."""
        if not entries:
            return
        rows, columns, blocks = np.asarray(entries, dtype=np.int64).T
        flat = torch.empty(2, len(entries), dtype=torch.int64, device=self.ints.device)
        _copy(flat, np.stack((rows * self.block_table.shape[1] + columns, blocks)))
        self.block_table.view(-1).index_copy_(0, flat[0], flat[1].to(torch.int32))


def _copy(target: torch.Tensor, values: np.ndarray) -> None:
    """From memory of its own that the device reads whenever it gets there: the host goes on at once."""
    source = torch.from_numpy(values)
    if target.device.type != "cpu":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
