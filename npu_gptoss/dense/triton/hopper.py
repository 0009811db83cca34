"""Projections of a few rows for Hopper, in Gluon: much of the weights is in shared memory before the kernel waits.

The weight's rows are the long side of the product (out.T = weight @ x.T), 64 of them a program, and each weight is read
once: a handful of tokens wastes little of a tile.
Here the schedule is written out. The tensor memory accelerator fills a ring of tiles; its first round is asked for
before the kernel waits for its predecessor, so that memory works while the predecessor ends, and less
is left to read afterwards. A library's kernel would begin with all of it.

Where there are few tiles of rows, several programs share one tile's inputs; the last to arrive adds their sums up, in
their order. The counters return to zero.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npu_gptoss.kernels.gluon_names import barrier, barriers, load_tile

ROWS = gl.constexpr(64)  # of the weight, in one program: what one matrix instruction takes

# fmt: off
# (lists of many arguments are shorter to read filled than one a line)


@gluon.jit
def begin(
    weights, x, row, first, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):
    """The ring and its barriers, for weights and for x; the weights of its first round are asked for."""
    tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, BLOCK_K], weights.layout)
    columns = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_T, BLOCK_K], x.layout)
    tiles_full = barriers(STAGES, 1)
    columns_full = barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    for each in gl.static_range(min(STAGES, STEPS)):
        full = tiles_full.index(each)
        mbarrier.expect(full, ROWS * BLOCK_K * 2)
        load_tile(weights, [row, first + each * BLOCK_K], full, tiles.index(each))
    return tiles, columns, tiles_full, columns_full


@gluon.jit
def product(
    weights, x, tiles, columns, tiles_full, columns_full, row, token, first, LAYOUT: gl.constexpr,
    BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr,
):
    """[ROWS, BLOCK_T] fp32: weights @ x.T over STEPS * BLOCK_K inputs from `first` on; beyond the last are zeros."""
    for each in gl.static_range(min(STAGES, STEPS)):
        full = columns_full.index(each)
        mbarrier.expect(full, BLOCK_T * BLOCK_K * 2)
        load_tile(x, [token, first + each * BLOCK_K], full, columns.index(each))
    sums = gl.zeros([ROWS, BLOCK_T], gl.float32, LAYOUT)
    for step in range(STEPS):
        stage = step % STAGES
        phase = step // STAGES & 1
        mbarrier.wait(tiles_full.index(stage), phase)
        mbarrier.wait(columns_full.index(stage), phase)
        sums = warpgroup_mma(tiles.index(stage), columns.index(stage).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=[sums])
        if step + STAGES < STEPS:
            barrier()  # all warps have read the stage
            at = first + (step + STAGES) * BLOCK_K
            mbarrier.expect(tiles_full.index(stage), ROWS * BLOCK_K * 2)
            load_tile(weights, [row, at], tiles_full.index(stage), tiles.index(stage))
            mbarrier.expect(columns_full.index(stage), BLOCK_T * BLOCK_K * 2)
            load_tile(x, [token, at], columns_full.index(stage), columns.index(stage))
    return sums


@gluon.jit
def turned(first, second, cos, sin):
    """RoPE of the pairs (first, second), rounded to bfloat16 once; cos and sin fp32."""
    a = first.to(gl.float32)
    b = second.to(gl.float32)
    return (a * cos - b * sin).to(gl.bfloat16), (b * cos + a * sin).to(gl.bfloat16)


@gluon.jit(do_not_specialize=["slots", "tokens", "real_tokens"])
def qkv_kernel(
    weights,  # descriptor of [(HEADS + 2 * KV_HEADS) * 64, inputs] in tiles of [64, BLOCK_K]
    x,  # descriptor of [tokens, inputs] in tiles of [BLOCK_T, BLOCK_K]; normed
    bias,  # [(HEADS + 2 * KV_HEADS) * 64]
    cos_sin,  # [positions, 64] float32
    positions,  # [tokens] int64
    slots,  # [>= real tokens] int64 or int32; negative: not written
    query,  # [tokens, HEADS, 64]
    key_cache,  # [slots, KV_HEADS, 64], heads STRIDE apart
    value_cache,
    tokens,
    real_tokens,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, STRIDE: gl.constexpr, BLOCK_T: gl.constexpr, BLOCK_K: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    """The projection, RoPE and the cache write; a program a head of 64 channels."""
    HALF: gl.constexpr = ROWS // 2
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16]
    )
    PAIRS: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [1, 4], [0, 1])
    head = gl.program_id(0)
    row = head * ROWS
    first_token = gl.program_id(1) * BLOCK_T
    tiles, columns, tiles_full, columns_full = begin(weights, x, row, 0, BLOCK_T, BLOCK_K, STEPS, STAGES)
    shift = gl.load(bias + row + gl.arange(0, ROWS, gl.SliceLayout(1, SUMS))).to(gl.float32)
    lane = gl.arange(0, HALF, gl.SliceLayout(1, PAIRS))[:, None]
    token = first_token + gl.arange(0, BLOCK_T, gl.SliceLayout(0, PAIRS))
    real = token < tokens
    # Positions and slots are the step's, not the chain's: whoever wrote them had ended before the chain began.
    table = cos_sin + gl.load(positions + token, mask=real, other=0)[None, :] * ROWS + lane
    cos = gl.load(table)
    sin = gl.load(table + HALF)
    slot = gl.load(slots + token, mask=token < real_tokens, other=-1).to(gl.int64)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    sums = product(
        weights, x, tiles, columns, tiles_full, columns_full, row, first_token, 0, SUMS, BLOCK_T, BLOCK_K, STEPS, STAGES
    )
    packed = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BLOCK_T], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    packed.store((sums + shift[:, None]).to(gl.bfloat16))
    barrier()
    first = packed.slice(0, HALF, 0).load(PAIRS)
    second = packed.slice(HALF, HALF, 0).load(PAIRS)
    if head < HEADS + KV_HEADS:
        first, second = turned(first, second, cos, sin)
    if head < HEADS:
        out = query + (token.to(gl.int64)[None, :] * HEADS + head) * ROWS + lane
        gl.store(out, first, mask=real[None, :])
        gl.store(out + HALF, second, mask=real[None, :])
    else:
        low = first.to(key_cache.dtype.element_ty)
        high = second.to(key_cache.dtype.element_ty)
        cached = key_cache + (slot[None, :] * KV_HEADS + head - HEADS) * STRIDE + lane
        if head >= HEADS + KV_HEADS:
            cached = value_cache + (slot[None, :] * KV_HEADS + head - HEADS - KV_HEADS) * STRIDE + lane
        gl.store(cached, low, mask=(slot >= 0)[None, :])
        gl.store(cached + HALF, high, mask=(slot >= 0)[None, :])


@gluon.jit(do_not_specialize=["tokens"])
def linear_kernel(
    weights,  # descriptor of [rows, inputs] in tiles of [64, BLOCK_K]
    x,  # descriptor of [tokens, inputs] in tiles of [BLOCK_T, BLOCK_K]
    bias,  # [rows], if HAS_BIAS
    residual,  # [tokens, rows], if HAS_RESIDUAL
    out,  # [tokens, rows]
    shares,  # [tiles of tokens, tiles of rows, SPLITS, BLOCK_T, 64] float32, if SPLITS > 1
    arrived,  # [tiles of tokens, tiles of rows] int32, zeros
    tokens,
    rows,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, SPLITS: gl.constexpr, BLOCK_T: gl.constexpr,
    BLOCK_K: gl.constexpr, STEPS: gl.constexpr, STAGES: gl.constexpr, PDL: gl.constexpr,
):
    """x @ weights.T + bias + residual; a program 64 rows and one of SPLITS shares of the inputs."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_T, 16]
    )
    WIDE: gl.constexpr = gl.BlockedLayout([2, 1], [32, 1], [1, 4], [0, 1])
    tile = gl.program_id(0)
    split = gl.program_id(2)
    row = tile * ROWS
    first_token = gl.program_id(1) * BLOCK_T
    first = split * (STEPS * BLOCK_K)
    tiles, columns, tiles_full, columns_full = begin(weights, x, row, first, BLOCK_T, BLOCK_K, STEPS, STAGES)
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    column = gl.arange(0, BLOCK_T, gl.SliceLayout(0, WIDE))
    inside = (first_token + column < tokens)[None, :] & (row + lane < rows)[:, None]
    target = (first_token + column).to(gl.int64)[None, :] * rows + (row + lane)[:, None]
    if HAS_BIAS:
        shift = gl.load(bias + row + lane, mask=row + lane < rows, other=0.0).to(gl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if HAS_RESIDUAL:
        before = gl.load(residual + target, mask=inside, other=0.0).to(gl.float32)
    sums = product(
        weights, x, tiles, columns, tiles_full, columns_full, row, first_token, first, SUMS, BLOCK_T, BLOCK_K, STEPS,
        STAGES,
    )
    total = gl.convert_layout(sums, WIDE)
    last = gl.to_tensor(True)
    if SPLITS > 1:
        series = gl.program_id(1) * gl.num_programs(0) + tile
        share = shares + series.to(gl.int64) * (SPLITS * BLOCK_T * ROWS) + column[None, :] * ROWS + lane[:, None]
        gl.store(share + split * (BLOCK_T * ROWS), total)
        barrier()  # all threads' sums, before one thread says that they are there
        last = gl.atomic_add(arrived + series, 1, sem="acq_rel") == SPLITS - 1
        if last:
            gl.store(arrived + series, 0)
            total = gl.zeros([ROWS, BLOCK_T], gl.float32, WIDE)
            for one in gl.static_range(SPLITS):
                # from the second level of cache: other programs wrote it
                total += gl.load(share + one * (BLOCK_T * ROWS), cache_modifier=".cg")
    if last:
        if HAS_BIAS:
            total += shift[:, None]
        if HAS_RESIDUAL:
            total += before
        gl.store(out + target, total.to(out.dtype.element_ty), mask=inside)


# fmt: on
