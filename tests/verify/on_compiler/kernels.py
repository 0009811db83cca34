"""Small Triton kernels for the tests of the compiler's steps."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def transposed(source, out, offset, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(out + offset + column * ROWS + row, tl.load(source + row * COLUMNS + column))
