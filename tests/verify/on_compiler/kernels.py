"""Small Triton kernels for the tests of the compiler's steps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transposed(source, out, offset, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(out + offset + column * ROWS + row, tl.load(source + row * COLUMNS + column))


@triton.jit
def doubled(source, out, count, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out + at, tl.load(source + at) * 2)


@triton.jit
def doubled_in_turns(source, out, count, SIZE: tl.constexpr):
    for turn in range(count):
        at = turn * SIZE + tl.arange(0, SIZE)
        tl.store(out + at, tl.load(source + at) * 2)
