"""The inputs of a decode step in tensors of fixed address.

The host fills the cursor (each request's next token and its position) and the block table; `advance`, the first
thing that a graph runs, turns them into the step's inputs and moves the cursor on; the last thing that it runs puts the
chosen tokens into the cursor. So the next step can be launched before the host has seen this one's tokens.

Row i is one request. The rows behind them pad the bucket: token 0 at position 0, no keys (seq_len 0 marks a padding
row), a slot that no request owns. They never hold values of an earlier step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from npu_gptoss.errors import InputError

NOBODY = -1  # the cursor's position of a padding row


@dataclass(frozen=True)
class DecodeState:
    """The inputs of up to `capacity` requests of up to `blocks` cache blocks each.

    cursor: [2, capacity] int64: the tokens to compute next, and their positions (NOBODY: padding).
    block_table: [capacity, blocks] int32.
    ints: [3, capacity] int64: the step's input ids, positions, slots.
    seq_lens: [capacity] int32, keys that the row's token sees, its own included.
    spare_slot: where padding rows write their keys and values.
    """

    cursor: torch.Tensor
    block_table: torch.Tensor
    ints: torch.Tensor
    seq_lens: torch.Tensor
    block_size: int
    spare_slot: int

    @classmethod
    def allocate(
        cls, capacity: int, blocks: int, block_size: int, spare_slot: int, device: torch.device
    ) -> DecodeState:
        """Allocates a state of padding rows only."""
        cursor = torch.zeros(2, capacity, dtype=torch.int64, device=device)
        cursor[1] = NOBODY
        return cls(
            cursor=cursor,
            block_table=torch.zeros(capacity, blocks, dtype=torch.int32, device=device),
            ints=torch.zeros(3, capacity, dtype=torch.int64, device=device),
            seq_lens=torch.zeros(capacity, dtype=torch.int32, device=device),
            block_size=block_size,
            spare_slot=spare_slot,
        )

    @property
    def capacity(self) -> int:
        return self.cursor.shape[1]

    def rows(self, count: int) -> DecodeState:
        """The first `count` rows, as views, for a graph of that size."""
        return DecodeState(
            self.cursor[:, :count],
            self.block_table[:count],
            self.ints[:, :count],
            self.seq_lens[:count],
            self.block_size,
            self.spare_slot,
        )

    @property
    def tokens(self) -> torch.Tensor:
        """[capacity] int64: the tokens to compute next, chosen by the last step; -1: its logits were not finite."""
        return self.cursor[0]

    @property
    def next_positions(self) -> torch.Tensor:
        return self.cursor[1]

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
        """One row a request: its next token, where that stands, and its blocks; the rest becomes padding."""
        count = len(token_ids)
        if not len(positions) == len(tables) == count <= self.capacity:
            raise InputError(
                f"a decode step takes up to {self.capacity} requests with a token, a position and a table each, "
                f"got {count}, {len(positions)} and {len(tables)}",
                field="requests",
            )
        cursor = np.zeros((2, self.capacity), dtype=np.int64)
        cursor[1] = NOBODY
        cursor[0, :count], cursor[1, :count] = token_ids, positions
        # Rows and columns that this leaves alone may hold blocks of an earlier step: no row's length reaches them.
        table = np.zeros((count, max((len(table) for table in tables), default=0)), dtype=np.int32)
        for row, blocks in zip(table, tables, strict=True):
            row[: len(blocks)] = blocks
        _copy(self.cursor, cursor)
        _copy(self.block_table[:count, : table.shape[1]], table)

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(row, index, block) each: requests that grew into a new block since `load`."""
        if not entries:
            return
        rows, columns, blocks = np.asarray(entries, dtype=np.int64).T
        flat = torch.empty(2, len(entries), dtype=torch.int64, device=self.cursor.device)
        _copy(flat, np.stack((rows * self.block_table.shape[1] + columns, blocks)))
        self.block_table.view(-1).index_copy_(0, flat[0], flat[1].to(torch.int32))


def _copy(target: torch.Tensor, values: np.ndarray) -> None:
    """Copies from a separate buffer, which the device may read later: the host goes on at once."""
    source = torch.from_numpy(values)
    if target.device.type != "cpu":
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
