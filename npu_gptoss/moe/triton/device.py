"""Device code that all kernels of the experts share: opening packed weights, the tiled product, the activation.

NATIVE is false in Triton's interpreter, which has neither inline assembly nor bfloat16 arithmetic: the same bits are
then moved by plain operations, and products are taken in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.moe.activation import ALPHA
from npu_gptoss.moe.triton.layout import BAND, INPUTS, MOST_ROWS, ROWS

# 13 instructions for 8 weights: masks where a code lies right, shifts where it does not (see layout.mxfp4_words)
OPEN_MXFP4 = tl.constexpr("""
{
.reg .b32 a, b, c, d, t;
and.b32 a, $4, 0x81C081C0;
shl.b32 t, $4, 4;
and.b32 b, t, 0x81C081C0;
shf.l.wrap.b32 t, $4, $4, 10;
and.b32 c, t, 0x81C081C0;
shr.b32 t, $4, 2;
and.b32 d, t, 0x01000100;
shl.b32 t, $4, 6;
lop3.b32 d, t, 0x80C080C0, d, 0xEA;
mul.rn.bf16x2 $0, a, $5;
mul.rn.bf16x2 $1, b, $5;
mul.rn.bf16x2 $2, c, $7;
mul.rn.bf16x2 $3, d, $7;
}
""")
# 0x7B80: 2 ** 120
_OPEN_FP8 = tl.constexpr("""
{
.reg .b32 a, b, t, s;
mov.b32 s, 0x7B807B80;
and.b32 a, $2, 0x87F087F0;
shl.b32 t, $2, 1;
and.b32 b, t, 0x80008000;
shr.b32 t, $2, 3;
lop3.b32 b, t, 0x07000700, b, 0xEA;
shl.b32 t, $2, 4;
lop3.b32 b, t, 0x00F000F0, b, 0xEA;
mul.rn.bf16x2 $0, a, s;
mul.rn.bf16x2 $1, b, s;
}
""")


@triton.jit
def _times(bits, factor):
    """bfloat16 bits in the low half of 32, times an fp32 factor that keeps it exact -> bfloat16."""
    return ((bits << 16).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def _halves(bits, like):
    """[m, n // 2] uint32 -> [m, n] int32: the low half of each, then the high one."""
    both = tl.join((bits & 0xFFFF).to(tl.int32), (bits >> 16).to(tl.int32))
    return tl.reshape(both, (like.shape[0], like.shape[1]))


@triton.jit
def open_mxfp4(words, first, second, NATIVE: tl.constexpr):
    """words [m, n] uint16, n even; first, second [m, n] int32: the groups' factors as two bfloat16 -> four [m, n] bf16.

    A thread must have words 2i and 2i + 1 of a row side by side, which every load of more than two bytes gives.
    """
    if NATIVE:
        return tl.inline_asm_elementwise(
            OPEN_MXFP4,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, first, second],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    even, odd = tl.split(tl.reshape(words.to(tl.uint32), (words.shape[0], words.shape[1] // 2, 2)))
    w = even | (odd << 16)
    low = (first << 16).to(tl.float32, bitcast=True)
    high = (second << 16).to(tl.float32, bitcast=True)
    a = _times(_halves(w & 0x81C081C0, words), low)
    b = _times(_halves((w << 4) & 0x81C081C0, words), low)
    c = _times(_halves(((w << 10) | (w >> 22)) & 0x81C081C0, words), high)
    d = _times(_halves(((w >> 2) & 0x01000100) | ((w << 6) & 0x80C080C0), words), high)
    return a, b, c, d


@triton.jit
def open_fp8(words, NATIVE: tl.constexpr):
    """words [m, n] uint16 -> two [m, n] bfloat16, the E4M3 values themselves."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            _OPEN_FP8, "=r,=r,r", [words], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    w = words.to(tl.int32)
    a = _times(w & 0x87F0, 2.0**120)
    b = _times(((w << 1) & 0x8000) | ((w >> 3) & 0x0700) | ((w << 4) & 0x00F0), 2.0**120)
    return a, b


@triton.jit
def _side_by_side(a, b):
    """Two [m, n] -> [m, 2 * n]."""
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (a.shape[0], 2 * a.shape[1]))


@triton.jit
def dot(a, b, sums, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.dot(a, b, sums)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)


@triton.jit
def product_ended(sums, COMPILED: tl.constexpr):
    """The same sums of a loop's product whose left side was made in registers, after the tensor cores have read them.

    Triton 3.6 and 3.7 let such a product run on into the loop's next step, which may write those registers: about one
    call in a hundred of the experts was wrong on an H200. Sums that are used at once are waited for. 3.9 waits itself.
    """
    if COMPILED:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [sums], dtype=tl.float32, is_pure=True, pack=1)
    return sums


@triton.jit
def _left(words, exponents, FORMAT: tl.constexpr, BM: tl.constexpr, NATIVE: tl.constexpr):
    """A tile of weights as bfloat16 in two halves, [BM, 32] each: the inputs 0 to 31, and 32 to 63.

    words [BM, n]; exponents [BM] int32: MXFP4's exponent fields of the two halves in the lowest two bytes.
    """
    if FORMAT == "mxfp4":
        # the byte is a bfloat16's exponent field; both halves of a word get it
        first = tl.broadcast_to(((exponents & 0xFF) * 0x00800080)[:, None], (BM, 16))
        second = tl.broadcast_to((((exponents >> 8) & 0xFF) * 0x00800080)[:, None], (BM, 16))
        a, b, c, d = open_mxfp4(words, first, second, NATIVE)
        low = _side_by_side(a, b)
        high = _side_by_side(c, d)
    else:
        low, high = open_fp8(words, NATIVE)
    return low, high


@triton.jit
def product(
    x,  # [rows, K] bfloat16
    x_row,  # [BN] the row of x in each column of the product
    x_valid,  # [BN] which of them to read; the others count as zero
    words, scales, expert,
    first_row,  # of the weights
    split,  # which of the SPLITS shares of the inputs to sum over
    FORMAT: tl.constexpr, R: tl.constexpr, K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    UNROLL: tl.constexpr,  # tiles of inputs in a step; 2: whatever their number, else a divisor of it
    HALVES: tl.constexpr,  # packed formats: a tile is multiplied in two halves, and a step waits for them
    SPLITS: tl.constexpr, STAGES: tl.constexpr, NATIVE: tl.constexpr, ROWS: tl.constexpr = ROWS,
    INPUTS: tl.constexpr = INPUTS, MOST_ROWS: tl.constexpr = MOST_ROWS,
):  # fmt: skip
    """One tile of weights @ x.T in fp32, [BM, BN]. FP8's row scales are the caller's to apply."""
    TILES: tl.constexpr = (K + INPUTS - 1) // INPUTS
    PAIRS: tl.constexpr = (TILES + 1) // 2
    STEPS: tl.constexpr = (TILES + UNROLL - 1) // UNROLL
    SHARE: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    ROW_TILES: tl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)
    WIDTH: tl.constexpr = 16 if FORMAT == "mxfp4" else 32 if FORMAT == "float8_e4m3fn" else 64
    TILE: tl.constexpr = ROWS * WIDTH
    m = first_row + tl.arange(0, BM)
    word = words + expert.to(tl.int64) * (ROW_TILES * TILES * TILE)
    word += ((m // ROWS) * (TILES * TILE) + (m % ROWS) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    half = tl.arange(0, INPUTS // 2)
    whole = tl.arange(0, INPUTS)
    column = x + x_row[None, :].to(tl.int64) * K
    valid = x_valid[None, :]
    scale = scales
    if FORMAT == "mxfp4":
        scale = scales + expert * (ROW_TILES * PAIRS * ROWS) + (m // ROWS) * (PAIRS * ROWS) + m % ROWS
    exponents = tl.zeros((BM,), tl.int32)
    sums = tl.zeros((BM, BN), tl.float32)
    begin = 0
    end = STEPS
    if SPLITS > 1:
        begin = split * SHARE
        end = tl.minimum(begin + SHARE, STEPS)
    for step in tl.range(begin, end, num_stages=STAGES):
        if FORMAT == "mxfp4" and UNROLL == 2:
            exponents = tl.load(scale + step * ROWS)
        for u in tl.static_range(UNROLL):
            tile = step * UNROLL + u
            if TILES % UNROLL == 0 or u == 0:
                w = tl.load(word + tile * TILE)
                reads = valid
            else:
                w = tl.load(word + tile * TILE, mask=tile < TILES, other=0)
                reads = valid & (tile < TILES)
            if FORMAT == "mxfp4":
                if UNROLL == 2:
                    shifted = exponents >> (16 * u)
                else:
                    shifted = tl.load(scale + (tile // 2) * ROWS) >> ((tile % 2) * 16)
            else:
                shifted = exponents
            if FORMAT != "bfloat16" and HALVES:
                k = tile * INPUTS + half
                low = reads if K % INPUTS == 0 else reads & (k < K)[:, None]
                high = reads if K % INPUTS == 0 else reads & (k + INPUTS // 2 < K)[:, None]
                x_low = tl.load(column + k[:, None], mask=low, other=0.0)
                x_high = tl.load(column + (k + INPUTS // 2)[:, None], mask=high, other=0.0)
                left_low, left_high = _left(w, shifted, FORMAT, BM, NATIVE)
                sums = dot(left_low, x_low, sums, NATIVE)
                sums = product_ended(dot(left_high, x_high, sums, NATIVE), NATIVE)  # the next step opens both at once
            else:
                k = tile * INPUTS + whole
                inside = reads if K % INPUTS == 0 else reads & (k < K)[:, None]
                right = tl.load(column + k[:, None], mask=inside, other=0.0)
                if FORMAT == "bfloat16":
                    left = w
                else:
                    left_low, left_high = _left(w, shifted, FORMAT, BM, NATIVE)
                    left = _side_by_side(left_low, left_high)
                sums = dot(left, right, sums, NATIVE)
    return sums


@triton.jit
def finish(sums, scales, bias, expert, first_row, split, FORMAT: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Row scales (FP8) and bias (of the first split) onto the sums [BM, n]."""
    m = first_row + tl.arange(0, BM)
    exists = m < R
    if FORMAT == "float8_e4m3fn":
        sums *= tl.load(scales + expert * R + m, mask=exists, other=0.0)[:, None]
    return sums + tl.load(bias + expert * R + m, mask=exists & (split == 0), other=0.0).to(tl.float32)[:, None]


@triton.jit
def add_low_rank(
    sums,  # [BM, BN] fp32
    own,  # [BN] the adapter of each column, negative for none
    b,  # [adapters, EXPERTS, R, RANK] bfloat16
    low,  # [SHARES, slots, RANK] fp32, from `many.shrink`
    slot, slots, expert, first_row,
    ADAPTERS: tl.constexpr, EXPERTS: tl.constexpr, RANK: tl.constexpr, SHARES: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Adds B (A x) of each column's own adapter to the sums. A x is rounded to bfloat16, as a linear layer's is."""
    BR: tl.constexpr = RANK if RANK < 32 else 32  # with 64 the largest tiles spill registers
    m = first_row + tl.arange(0, BM)
    for each in range(ADAPTERS):
        mine = own == each
        if tl.max(mine.to(tl.int32)) > 0:
            right = b + ((each * EXPERTS + expert).to(tl.int64) * R + m)[:, None] * RANK
            # in one stage: Triton would hold all shares of several rounds in shared memory, of bfloat16's tiles 552 KiB
            for first in tl.range(0, RANK, BR, num_stages=1):
                r = first + tl.arange(0, BR)
                inner = tl.zeros((BR, sums.shape[1]), tl.float32)
                for share in tl.static_range(SHARES):
                    at = low + (share * slots + slot).to(tl.int64)[None, :] * RANK + r[:, None]
                    inner += tl.load(at, mask=mine[None, :], other=0.0)
                w = tl.load(right + r[None, :], mask=(m < R)[:, None], other=0.0)
                sums = product_ended(dot(w, inner.to(tl.bfloat16), sums, NATIVE), NATIVE)
    return sums


@triton.jit
def swigluoai_bands(
    gate_up, limit, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr = BAND, ALPHA: tl.constexpr = ALPHA
):
    """[BM, BN], rows in bands of 8 of gate and 8 of up -> [BM // 2, BN]."""
    bands = tl.reshape(gate_up, (BM // (2 * BAND), 2, BAND, BN))
    gate, up = tl.split(tl.permute(bands, (0, 2, 3, 1)))
    gate = tl.minimum(tl.reshape(gate, (BM // 2, BN)), limit)
    up = tl.minimum(tl.maximum(tl.reshape(up, (BM // 2, BN)), -limit), limit)
    return (up + 1) * gate / (1 + tl.exp(gate * -ALPHA))


@triton.jit
def local_expert(topk_ids, expert_map, at, mask, HAS_MAP: tl.constexpr):
    """The local experts of slots, -1 for padding, for experts of other ranks and where the mask is false; int32."""
    ids = tl.load(topk_ids + at, mask=mask, other=-1).to(tl.int32)
    if HAS_MAP:
        ids = tl.load(expert_map + ids, mask=ids >= 0, other=-1)
    return ids
