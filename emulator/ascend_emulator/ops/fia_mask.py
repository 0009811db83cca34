"""Visibility of keys, and how the kernel reads the 2048 x 2048 compressed mask.

For packed tokens the attention kernel of CANN 8.3.RC1 never reads the mask at the tokens' own positions. It works in
tiles (up to 512 query rows by up to 512 keys, sliced into at most 16 rows per vector core pass). For each slice it
reads a window of the mask, shifted by the distance between the slice's first row and the tile's first key: to the right
if the keys lie ahead, down if they lie behind, clamped to the slice. Ones of this reading are masked. A band
(sparse_mode 4) reads a second window, shifted further by pre_tokens + 1, whose *zeros* are masked. Readings that cannot
mask anything are skipped. With the strict upper triangle, key c is seen from absolute position p iff p - pre_tokens <=
c <= p + next_tokens, with positions anchored at the end of the keys. Other masks give other keys, which shows in long
chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ascend_emulator.ops.fia_call import MASK_SIDE

ROWS_PER_TILE = 512
KEYS_PER_BLOCK = 128
BLOCKS_PER_TILE = 4

_triangle: torch.Tensor | None = None


def is_strict_triangle(mask: torch.Tensor) -> bool:
    """True if the last two dimensions are exactly the strict upper triangle of ones."""
    global _triangle
    if _triangle is None:
        _triangle = torch.ones(MASK_SIDE, MASK_SIDE, dtype=torch.uint8).triu_(1)
    plain = mask.detach().reshape(MASK_SIDE, MASK_SIDE).view(torch.uint8)
    if plain.storage_offset() % 8:
        return torch.equal(plain, _triangle)
    return torch.equal(plain.view(torch.int64), _triangle.view(torch.int64))  # eight at a time: every layer checks


def band(q_len: int, kv_len: int, pre_tokens: int, next_tokens: int) -> torch.Tensor:
    """Visibility [q_len, kv_len]: p - pre <= c <= p + next with p anchored at the end of the keys."""
    position = torch.arange(kv_len - q_len, kv_len)[:, None]
    column = torch.arange(kv_len)[None]
    return (column >= position - pre_tokens) & (column <= position + next_tokens)


@dataclass(frozen=True)
class Tiling:
    """Tile sizes that the host chooses once per call from the longest request."""

    rows: int
    keys: int
    folded_heads: int = 1

    @classmethod
    def of(cls, q_lens: list[int], kv_lens: list[int], group: int, want_lse: bool) -> Tiling:
        longest_q, longest_kv = max(q_lens), max(kv_lens)
        block = min(KEYS_PER_BLOCK, _up(longest_kv, 16))
        blocks = min(BLOCKS_PER_TILE, -(-longest_kv // max(block, 1)))
        folded = all(n == 1 for n in q_lens) and group <= 16 and not want_lse
        return cls(min(ROWS_PER_TILE, _up(longest_q, 16)), max(block * blocks, 16), group if folded else 1)


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def read_as_hardware_does(
    mask: torch.Tensor, q_len: int, kv_len: int, mode: int, pre_tokens: int, next_tokens: int, tiling: Tiling
) -> torch.Tensor:
    """Visibility [q_len, kv_len] of one request under any `mask` (2048 x 2048, non-zero masks)."""
    ones = mask.detach().reshape(MASK_SIDE, MASK_SIDE) != 0
    seen = torch.zeros(q_len, kv_len, dtype=torch.bool)
    for first in range(0, q_len, tiling.rows):
        rows = min(tiling.rows, q_len - first)
        begin, end = _key_range(first, tiling.rows, q_len, kv_len, mode, pre_tokens, next_tokens)
        half = (rows + 1) // 2
        for core_first, core_rows in ((0, half), (half, rows - half)):
            for key in range(begin, end, tiling.keys):
                width = min(tiling.keys, end - key)
                step = max(min(1024 // _up(width, 64) * 8, core_rows * tiling.folded_heads) // tiling.folded_heads, 1)
                for offset in range(0, core_rows, step):
                    row = first + core_first + offset
                    height = min(step, core_rows - offset)
                    seen[row : row + height, key : key + width] = _slice(
                        ones, row, key, height, width, step, q_len, kv_len, mode, pre_tokens, next_tokens, tiling
                    )
    return seen


def _key_range(
    first: int, tile_rows: int, q_len: int, kv_len: int, mode: int, pre_tokens: int, next_tokens: int
) -> tuple[int, int]:
    """The keys that a tile of rows visits at all, aligned to 8."""
    begin, end = 0, min(first + tile_rows + kv_len - q_len, kv_len)
    if mode == 4:
        begin = max(first - (pre_tokens + q_len - kv_len), 0)
        end = min(first + tile_rows + next_tokens - q_len + kv_len, kv_len)
        if end <= begin:
            begin, end = 0, kv_len
    return begin // 8 * 8, min(_up(end, 8), kv_len)


def _slice(
    ones: torch.Tensor,
    row: int,
    key: int,
    height: int,
    width: int,
    step: int,
    q_len: int,
    kv_len: int,
    mode: int,
    pre_tokens: int,
    next_tokens: int,
    tiling: Tiling,
) -> torch.Tensor:
    if mode == 3:
        ahead, behind = row - key + kv_len - q_len, None
    else:
        ahead = row - key + kv_len - max(q_len - next_tokens, 0)
        behind = row - key - (q_len - max(kv_len - pre_tokens, 0)) - 1
    seen = torch.ones(height, width, dtype=torch.bool)
    if ahead < _up(width, 16):
        seen &= ~_window(ones, ahead, height, width, step, tiling.keys)
    if behind is not None and behind + 1 + step * tiling.folded_heads > 0:
        seen &= _window(ones, behind, height, width, step, tiling.keys)
    return seen


def _window(ones: torch.Tensor, distance: int, height: int, width: int, step: int, tile_keys: int) -> torch.Tensor:
    """The part of the mask for a slice whose first row is `distance` after its first key."""
    down, right = (min(distance, tile_keys), 0) if distance > 0 else (0, min(-distance, step))
    return ones[down : down + height, right : right + width]
