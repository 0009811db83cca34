"""Device code that all kernels of the experts share: opening packed weights, the tiled product, the activation.

NATIVE is false in Triton's interpreter, which has neither inline assembly nor bfloat16 arithmetic: the same bits are
then moved by plain operations, and products are taken in fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.moe.activation import ALPHA
from npu_gptoss.moe.triton.layout import BAND, INPUTS, ROWS

_ALPHA = tl.constexpr(ALPHA)

# 13 instructions for 8 weights: masks where a code lies right, shifts where it does not (see layout.mxfp4_words)
_OPEN_MXFP4 = tl.constexpr("""
{
.reg .b32 a, b, c, d, t;
and.b32 a, $4, 0x81C081C0;
shl.b32 t, $4, 3;
and.b32 b, t, 0x81C081C0;
shl.b32 t, $4, 6;
and.b32 c, t, 0x81C081C0;
shl.b32 t, $4, 1;
and.b32 d, t, 0x80008000;
shr.b32 t, $4, 3;
lop3.b32 d, t, 0x01800180, d, 0xEA;
shr.b32 t, $4, 7;
lop3.b32 d, t, 0x00400040, d, 0xEA;
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
_PREFETCH = tl.constexpr("""
{
prefetch.global.L2 [$1];
mov.u32 $0, 0;
}
""")


@triton.jit
def _times(bits, factor):
    """bfloat16 bits in the low half of 32, times an fp32 factor that keeps it exact -> bfloat16."""
    return ((bits << 16).to(tl.float32, bitcast=True) * factor).to(tl.bfloat16)


@triton.jit
def open_mxfp4(words, first, second, NATIVE: tl.constexpr):
    """words [m, n] uint16; first, second [m, n] int32: the groups' factors as two bfloat16 -> four [m, n] bfloat16."""
    if NATIVE:
        return tl.inline_asm_elementwise(
            _OPEN_MXFP4,
            "=r,=r,=r,=r,r,r,r,r,r",
            [words, first, second],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    w = words.to(tl.int32)
    low = (first << 16).to(tl.float32, bitcast=True)
    high = (second << 16).to(tl.float32, bitcast=True)
    a = _times(w & 0x81C0, low)
    b = _times((w << 3) & 0x81C0, low)
    c = _times((w << 6) & 0x81C0, high)
    d = _times(((w << 1) & 0x8000) | ((w >> 3) & 0x0180) | ((w >> 7) & 0x0040), high)
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
def _four_side_by_side(a, b, c, d):
    """Four [m, n] -> [m, 4 * n]."""
    joined = tl.join(tl.join(a, b), tl.join(c, d))
    return tl.reshape(tl.permute(joined, (0, 3, 2, 1)), (a.shape[0], 4 * a.shape[1]))


@triton.jit
def _dot(a, b, sums, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.dot(a, b, sums)
    return tl.dot(a.to(tl.float32), b.to(tl.float32), sums)


@triton.jit
def product(
    x,  # [rows, K] bfloat16
    x_row,  # [BN] the row of x in each column of the product
    x_valid,  # [BN] which of them to read; the others count as zero
    words,
    scales,
    expert,
    first_row,  # of the weights
    FORMAT: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    UNROLL: tl.constexpr,
    SUMS: tl.constexpr,  # independent sums, 1 or 2: a chain half as long where few programs share a multiprocessor
    STAGES: tl.constexpr,
    NATIVE: tl.constexpr,
    ROWS: tl.constexpr = ROWS,
    INPUTS: tl.constexpr = INPUTS,
):
    """One tile of weights @ x.T in fp32, [BM, BN]. FP8's row scales are the caller's to apply."""
    TILES: tl.constexpr = (K + INPUTS - 1) // INPUTS
    PAIRS: tl.constexpr = (TILES + 1) // 2
    ROW_TILES: tl.constexpr = (R + ROWS - 1) // ROWS
    WIDTH: tl.constexpr = 16 if FORMAT == "mxfp4" else 32 if FORMAT == "float8_e4m3fn" else 64
    TILE: tl.constexpr = ROWS * WIDTH
    m = first_row + tl.arange(0, BM)
    if (ROW_TILES * ROWS) % BM != 0:
        m = tl.minimum(m, ROW_TILES * ROWS - 1)  # a row twice instead of one of the next expert
    inner = tl.arange(0, INPUTS)
    at = (m // ROWS) * (TILES * TILE) + (m % ROWS) * WIDTH
    word = words + expert.to(tl.int64) * (ROW_TILES * TILES * TILE) + at[:, None] + tl.arange(0, WIDTH)[None, :]
    column = x + x_row[None, :].to(tl.int64) * K + inner[:, None]
    valid = x_valid[None, :]
    if FORMAT == "mxfp4":
        scale = scales + expert * (ROW_TILES * PAIRS * ROWS) + (m // ROWS) * (PAIRS * ROWS) + m % ROWS
    sums = tl.zeros((BM, BN), tl.float32)
    more = tl.zeros((BM, BN), tl.float32)
    for step in tl.range(0, TILES // UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):
            tile = step * UNROLL + u
            w = tl.load(word + tile * TILE)
            if K % INPUTS == 0:
                right = tl.load(column + tile * INPUTS, mask=valid, other=0.0)
            else:
                right = tl.load(column + tile * INPUTS, mask=valid & (tile * INPUTS + inner < K)[:, None], other=0.0)
            if FORMAT == "mxfp4":
                exponents = tl.load(scale + (tile // 2) * ROWS) >> ((tile % 2) * 16)
                # the byte is a bfloat16's exponent field; both halves of a word get it
                first = tl.broadcast_to(((exponents & 0xFF) * 0x00800080)[:, None], (BM, WIDTH))
                second = tl.broadcast_to((((exponents >> 8) & 0xFF) * 0x00800080)[:, None], (BM, WIDTH))
                a, b, c, d = open_mxfp4(w, first, second, NATIVE)
                left = _four_side_by_side(a, b, c, d)
            elif FORMAT == "float8_e4m3fn":
                a, b = open_fp8(w, NATIVE)
                left = _side_by_side(a, b)
            else:
                left = w
            if SUMS == 2 and u % 2 == 1:
                more = _dot(left, right, more, NATIVE)
            else:
                sums = _dot(left, right, sums, NATIVE)
    if SUMS == 2:
        sums += more
    return sums


@triton.jit
def finish(sums, scales, bias, expert, first_row, FORMAT: tl.constexpr, R: tl.constexpr, BM: tl.constexpr):
    """Row scales (FP8) and bias onto the sums [BM, n]."""
    m = first_row + tl.arange(0, BM)
    exists = m < R
    if FORMAT == "float8_e4m3fn":
        sums *= tl.load(scales + expert * R + m, mask=exists, other=0.0)[:, None]
    return sums + tl.load(bias + expert * R + m, mask=exists, other=0.0).to(tl.float32)[:, None]


@triton.jit
def swigluoai_bands(gate_up, limit, BM: tl.constexpr, BN: tl.constexpr, BAND: tl.constexpr = BAND):
    """[BM, BN], rows in bands of 8 of gate and 8 of up -> [BM // 2, BN]."""
    bands = tl.reshape(gate_up, (BM // (2 * BAND), 2, BAND, BN))
    gate, up = tl.split(tl.permute(bands, (0, 2, 3, 1)))
    gate = tl.minimum(tl.reshape(gate, (BM // 2, BN)), limit)
    up = tl.minimum(tl.maximum(tl.reshape(up, (BM // 2, BN)), -limit), limit)
    return (up + 1) * gate / (1 + tl.exp(-_ALPHA * gate))


@triton.jit
def local_expert(topk_ids, expert_map, at, mask, HAS_MAP: tl.constexpr):
    """The local experts of slots, -1 for padding, for experts of other ranks and where the mask is false; int32."""
    ids = tl.load(topk_ids + at, mask=mask, other=-1).to(tl.int32)
    if HAS_MAP:
        ids = tl.load(expert_map + ids, mask=ids >= 0, other=-1)
    return ids


@triton.jit
def prefetch(pointers):
    """Asks for the cache lines of a tensor of pointers, without waiting."""
    tl.inline_asm_elementwise(_PREFETCH, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)
