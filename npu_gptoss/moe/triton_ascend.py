"""The expansion of packed MXFP4 experts on a 910B's vector cores, for Triton-Ascend. `packed.py` has the layout.

The bits of a bfloat16 are made with integers of 16 bits. A code's three bits of size are exponent and mantissa, so
`size << 6` puts them where bfloat16 has them and the scale is added to the exponent; 0, 0.5 and results below 2 ** -126
are corrected by minima and maxima, not by comparisons, which the card has for 32 bits only. Every right shift has its
low bits cleared before: the compiler lowers it with `round : true`, and a rounding shift would be another number.

Loading this module imports triton. `npu-gptoss verify --compile` says what was seen of it, and docs/verify.md what not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_gptoss.kernels.triton_ascend import vector_cores
from npu_gptoss.moe.packed import PackedMatrix


@triton.jit
def expand_kernel(
    words,  # [experts, tiles, ROWS, COLUMNS] int16
    scales,  # [experts, tiles * 4 * ROWS / 32, COLUMNS] uint8
    experts,  # [slots] int32: which expert a slot gets, -1: none
    out,  # [slots, tiles, 4, ROWS, COLUMNS] int16, the bits of bfloat16
    slots,
    tiles,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + column[None, :]
    one = tl.full((), 1, tl.int16)
    unit = tl.full((), 64, tl.int16)  # of a size at the place of bfloat16's mantissa
    for slot in range(slots):
        expert = tl.load(experts + slot)
        if expert >= 0:
            source = expert.to(tl.int64) * tiles
            target = tl.cast(slot, tl.int64) * tiles
            for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                scale = tl.load(scales + (source + tile) * (4 * ROWS) // 32 * COLUMNS + column).to(tl.int16)
                exponent = (scale - 1) * 2  # in units of 64
                # of subnormals, which a scale of 0 and 1 makes; from 2 on the sum below is never under 64 * size
                step = tl.minimum(scale, one) * 32 + 32
                packed = tl.load(words + (source + tile) * (ROWS * COLUMNS) + at)
                for quarter in range(4):
                    size = packed & 7
                    bits = size << 6
                    above = tl.maximum(bits, unit) - 64
                    normal = exponent[None, :] * tl.minimum(bits, unit) + above + tl.minimum(above, unit)
                    sign = (packed & 8) << 12
                    values = tl.maximum(normal, step[None, :] * size) | sign
                    tl.store(out + ((target + tile) * 4 + quarter) * (ROWS * COLUMNS) + at, values)
                    packed = (packed & -16) >> 4


def expand(packed: PackedMatrix, experts: torch.Tensor, out: torch.Tensor) -> None:
    """Does as `npu_gptoss.moe.packed.expand`."""
    _, tiles, rows, columns = packed.words.shape
    expand_kernel[(vector_cores(out.device),)](
        packed.words, packed.scales, experts, out.view(torch.int16), experts.shape[0], tiles, ROWS=rows, COLUMNS=columns
    )
