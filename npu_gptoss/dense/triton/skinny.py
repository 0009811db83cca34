"""Projections of a few rows: the weight streams through the matrix units once, whatever the rows.

The weight's rows are the long side of the product (out.T = weight @ x.T), so that a handful of tokens wastes little of
a tile. Eight-bit weights are widened in registers, exactly, and scaled after the sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, product_ended, wait_for_inputs


@triton.jit
def skinny_kernel(
    x,  # [tokens, IN]
    weight,  # [rows, IN] in the dtype of x, or fp8
    weight_scale,  # [rows] fp32, if SCALED
    bias,  # [rows], if HAS_BIAS
    residual,  # [tokens, rows], if HAS_RESIDUAL
    out,  # [tokens, rows]
    tokens,
    rows,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    at = tl.arange(0, BLOCK_K)
    real_row = row < rows
    real_token = token < tokens
    let_next_start(PDL)
    wait_for_inputs(PDL)
    total = tl.zeros((ROWS, BLOCK_T), tl.float32)
    for start in tl.range(0, IN, BLOCK_K, num_stages=STAGES):
        within = start + at < IN
        tile = tl.load(
            weight + row[:, None] * IN + (start + at)[None, :], mask=real_row[:, None] & within[None, :], other=0.0
        )
        columns = tl.load(
            x + token[None, :] * IN + (start + at)[:, None], mask=real_token[None, :] & within[:, None], other=0.0
        )
        total = tl.dot(tile.to(DTYPE), columns, total, input_precision="ieee")
        if SCALED:
            total = product_ended(total, PDL)
    if SCALED:
        total *= tl.load(weight_scale + row, mask=real_row, other=0.0)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + row, mask=real_row, other=0.0).to(tl.float32)[:, None]
    place = token[None, :].to(tl.int64) * rows + row[:, None]
    inside = real_row[:, None] & real_token[None, :]
    if HAS_RESIDUAL:
        total = total.to(DTYPE).to(tl.float32)
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(DTYPE), mask=inside)
