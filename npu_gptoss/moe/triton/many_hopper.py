"""Prefill's two products for Hopper, in Gluon: copies and products in warps of their own. MXFP4, whole steps of inputs.

Groups, their order and the arithmetic are those of `many.py`. One program a multiprocessor takes tile after tile. Four
warps bring weights and the slots' inputs, wherever their rows lie, into shared memory. Two groups of four own half of a
tile's rows each, open them in registers and hand them to the tensor cores from there; a group opens its next weights
while the tensor cores work on its last. Tiles are wide (128 rows of weights by 256 slots), where a weight is opened for
as many slots as registers hold sums of, or tall (256 by 128), where groups of slots are too short for wide ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from npu_gptoss.kernels.gluon_names import add, barrier, barriers, load_elements
from npu_gptoss.moe.activation import ALPHA as SWIGLU_ALPHA
from npu_gptoss.moe.triton import layout
from npu_gptoss.moe.triton.device import OPEN_MXFP4

ROWS = gl.constexpr(layout.ROWS)
MOST_ROWS = gl.constexpr(layout.MOST_ROWS)
INPUTS = gl.constexpr(layout.INPUTS)  # of a step
BAND = gl.constexpr(layout.BAND)
WORDS = gl.constexpr(16)  # of a row in a step
ALPHA = gl.constexpr(SWIGLU_ALPHA)
LOG2_E = gl.constexpr(1.4426950408889634)

# fmt: off
# (lists of twenty arguments are shorter to read filled than one a line)


@gluon.jit
def _groups(ends, BE: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns where each group begins and ends, and the number of the first tile of the next group, [BE] each."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    e = gl.arange(0, BE, LINE)
    end = gl.load(ends + e)
    start = gl.load(ends + e - 1, mask=e > 0, other=0)
    return e, start, end, gl.associative_scan(gl.cdiv(end - start, COLUMNS), 0, add)


@gluon.jit
def _tile(ends, number, BE: gl.constexpr, COLUMNS: gl.constexpr):
    """Returns of the tile of that number in all groups: expert, its first place in the order, the group's end."""
    e, start, end, last = _groups(ends, BE, COLUMNS)
    expert = gl.sum((last <= number).to(gl.int32), 0)
    own = e == expert
    before = gl.sum(gl.where(e < expert, gl.cdiv(end - start, COLUMNS), 0), 0)
    first = gl.sum(gl.where(own, start, 0), 0) + (number - before) * COLUMNS
    return expert, first, gl.sum(gl.where(own, end, 0), 0)


@gluon.jit
def _works(ends, BE: gl.constexpr, COLUMNS: gl.constexpr, ROW_TILES: gl.constexpr):
    _, start, end, _ = _groups(ends, BE, COLUMNS)
    return gl.sum(gl.cdiv(end - start, COLUMNS), 0) * ROW_TILES


@gluon.jit
def fetch(
    x, order, ends, words, scales, x_tiles, word_tiles, scale_tiles, full, empty, TOP_K: gl.constexpr,
    BE: gl.constexpr, BLOCKS: gl.constexpr, R: gl.constexpr, K: gl.constexpr, HEIGHT: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr,
):
    """The producer. TOP_K: of the slots to a row of x; 0: rows of x are in the order of the places."""
    STEPS: gl.constexpr = K // INPUTS
    PAIRS: gl.constexpr = (STEPS + 1) // 2
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    PACKED: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    column = gl.arange(0, COLUMNS, gl.SliceLayout(1, WIDE))
    k = gl.arange(0, INPUTS, gl.SliceLayout(0, WIDE))
    word_column = gl.arange(0, WORDS, gl.SliceLayout(0, PACKED))[None, :]
    m = gl.arange(0, 2 * HEIGHT, gl.SliceLayout(1, PACKED))
    line = gl.arange(0, 2 * HEIGHT, LINE)
    ROW_TILES: gl.constexpr = (BLOCKS + 1) // 2
    KEPT: gl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)  # tiles of the layout, in an expert
    done = 0
    for work in range(gl.program_id(0), _works(ends, BE, COLUMNS, ROW_TILES), gl.num_programs(0)):
        expert, first, end = _tile(ends, work // ROW_TILES, BE, COLUMNS)
        place = gl.minimum(first + column, end - 1)  # columns behind the group's end are not stored
        if TOP_K > 0:
            row = gl.load(order + place) // TOP_K
        else:
            row = place
        source = x + (row.to(gl.int64) * K)[:, None] + k[None, :]
        # rows behind the last ones are not computed; in their place the last tile of the layout is fetched
        row_tile = work % ROW_TILES * (2 * HEIGHT // ROWS)
        word_tile = expert * KEPT + gl.minimum(row_tile + m // ROWS, KEPT - 1)
        word = words + (word_tile.to(gl.int64) * (STEPS * ROWS * WORDS) + m % ROWS * WORDS)[:, None] + word_column
        scale_tile = expert * KEPT + gl.minimum(row_tile + line // ROWS, KEPT - 1)
        scale = scales + scale_tile * (PAIRS * ROWS) + line % ROWS
        for step in range(STEPS):
            stage = (done + step) % STAGES
            mbarrier.wait(empty.index(stage), ((done + step) // STAGES & 1) ^ 1)
            load_elements(word_tiles.index(stage), word + step * (ROWS * WORDS))
            load_elements(scale_tiles.index(stage), scale + step // 2 * ROWS)
            load_elements(x_tiles.index(stage), source + step * INPUTS)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
        done += STEPS


@gluon.jit
def opened(words, exponents, OPERAND: gl.constexpr, HEIGHT: gl.constexpr):
    """words [HEIGHT, 16], exponents [HEIGHT]: the fields of the two halves in the lowest two bytes -> [HEIGHT, 64]."""
    first = gl.expand_dims((exponents & 0xFF) * 0x00800080, 1).broadcast_to(HEIGHT, WORDS)
    second = gl.expand_dims(((exponents >> 8) & 0xFF) * 0x00800080, 1).broadcast_to(HEIGHT, WORDS)
    a, b, c, d = gl.inline_asm_elementwise(
        OPEN_MXFP4, "=r,=r,=r,=r,r,r,r,r,r", [words, first, second],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )
    low = gl.join(a, b).permute((0, 2, 1)).reshape([HEIGHT, 2 * WORDS])
    high = gl.join(c, d).permute((0, 2, 1)).reshape([HEIGHT, 2 * WORDS])
    whole = gl.join(low, high).permute((0, 2, 1)).reshape([HEIGHT, INPUTS])
    return gl.convert_layout(whole, OPERAND, assert_trivial=True)


@gluon.jit
def sigmoid_of(x):
    """1 / (1 + exp(-ALPHA * x)), by the approximations that the hardware has: two units in fp32's last place."""
    below = 1 + gl.exp2(x * (-ALPHA * LOG2_E))
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def opened_stage(
    word_tiles, scale_tiles, stage, half, NUMBER: gl.constexpr, OPERAND: gl.constexpr, HEIGHT: gl.constexpr,
):
    """half: 16 for every other step, whose exponents are in the upper half of the word."""
    words = word_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT).load(OPERAND)
    exponents = scale_tiles.index(stage).slice(NUMBER * HEIGHT, HEIGHT).load(gl.SliceLayout(1, OPERAND))
    return opened(words, exponents >> half, OPERAND, HEIGHT)


@gluon.jit
def one_tile(
    order, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty, expert, first, end, block,
    done, GATE_UP: gl.constexpr, R: gl.constexpr, K: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr,
    STAGES: gl.constexpr, NUMBER: gl.constexpr,
):
    """HEIGHT rows of weights by WIDTH slots, from the opened weights to the stored results."""
    STEPS: gl.constexpr = K // INPUTS
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=2)
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    sums = gl.zeros([HEIGHT, WIDTH], gl.float32, SUMS)
    mbarrier.wait(full.index(done % STAGES), done // STAGES & 1)
    left = opened_stage(word_tiles, scale_tiles, done % STAGES, 0, NUMBER, OPERAND, HEIGHT)
    for step in range(STEPS - 1):
        now = done + step
        stage = now % STAGES
        sums = warpgroup_mma(left, x_tiles.index(stage).slice(0, WIDTH).permute((1, 0)), sums, is_async=True)
        after = (now + 1) % STAGES
        mbarrier.wait(full.index(after), (now + 1) // STAGES & 1)
        next_left = opened_stage(word_tiles, scale_tiles, after, (step + 1) % 2 * 16, NUMBER, OPERAND, HEIGHT)
        # This passes at once. It ends a block of instructions, beyond which ptxas does not move the wait below: without
        # it, half of the weights were opened after that wait.
        mbarrier.wait(full.index(after), (now + 1) // STAGES & 1)
        sums, left = warpgroup_mma_wait(0, deps=[sums, left])
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)
        left = next_left
    stage = (done + STEPS - 1) % STAGES
    sums = warpgroup_mma(left, x_tiles.index(stage).slice(0, WIDTH).permute((1, 0)), sums, is_async=True)
    sums, left = warpgroup_mma_wait(0, deps=[sums, left])
    barrier()
    mbarrier.arrive(empty.index(stage), count=1)

    m = block * HEIGHT + gl.arange(0, HEIGHT, gl.SliceLayout(1, SUMS))
    sums += gl.load(bias + expert * R + m, mask=m < R, other=0.0).to(gl.float32)[:, None]
    if GATE_UP:
        OUT_ROWS: gl.constexpr = HEIGHT // 2
        OUT_R: gl.constexpr = R // 2
        gate, up = sums.reshape([HEIGHT // (2 * BAND), 2, BAND, WIDTH]).permute((0, 2, 3, 1)).split()
        gate = gl.minimum(gate, limit)
        up = gl.minimum(gl.maximum(up, -limit), limit)
        result = ((up + 1) * gate * sigmoid_of(gate)).reshape([OUT_ROWS, WIDTH])
    else:
        OUT_ROWS: gl.constexpr = HEIGHT
        OUT_R: gl.constexpr = R
        at = first + gl.arange(0, WIDTH, LINE)
        slot = gl.load(order + at, mask=at < end, other=0)
        weight = gl.load(topk_weights + slot, mask=at < end, other=0.0)
        result = sums * gl.convert_layout(weight, gl.SliceLayout(0, SUMS))[None, :]
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [OUT_ROWS // 8, 256 // OUT_ROWS], [1, 4], [0, 1])
    result = gl.convert_layout(result.to(gl.bfloat16), STORED)
    place = first + gl.arange(0, WIDTH, gl.SliceLayout(0, STORED))
    real = place < end
    target = place
    if not GATE_UP:
        target = gl.load(order + place, mask=real, other=0)
    m_out = block * OUT_ROWS + gl.arange(0, OUT_ROWS, gl.SliceLayout(1, STORED))
    pointer = out + (target.to(gl.int64) * OUT_R)[None, :] + m_out[:, None]
    gl.store(pointer, result, mask=real[None, :] & (m_out < OUT_R)[:, None])


@gluon.jit
def passed(full, empty, done, STEPS: gl.constexpr, STAGES: gl.constexpr):
    """A tile whose rows are none of this group's: what is fetched for the other one is given back."""
    for step in range(STEPS):
        stage = (done + step) % STAGES
        mbarrier.wait(full.index(stage), (done + step) // STAGES & 1)
        barrier()
        mbarrier.arrive(empty.index(stage), count=1)


@gluon.jit
def compute(
    order, ends, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty, GATE_UP: gl.constexpr,
    BE: gl.constexpr, BLOCKS: gl.constexpr, R: gl.constexpr, K: gl.constexpr, HEIGHT: gl.constexpr,
    COLUMNS: gl.constexpr, STAGES: gl.constexpr, NUMBER: gl.constexpr,
):
    """A consumer: HEIGHT rows of each tile. A group's last tile is computed as half a tile where that holds it."""
    ROW_TILES: gl.constexpr = (BLOCKS + 1) // 2
    done = 0
    for work in range(gl.program_id(0), _works(ends, BE, COLUMNS, ROW_TILES), gl.num_programs(0)):
        expert, first, end = _tile(ends, work // ROW_TILES, BE, COLUMNS)
        block = work % ROW_TILES * 2 + NUMBER
        if block >= BLOCKS:
            passed(full, empty, done, K // INPUTS, STAGES)
        elif end - first > COLUMNS // 2:
            one_tile(
                order, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty, expert, first,
                end, block, done, GATE_UP, R, K, HEIGHT, COLUMNS, STAGES, NUMBER,
            )
        else:
            one_tile(
                order, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty, expert, first,
                end, block, done, GATE_UP, R, K, HEIGHT, COLUMNS // 2, STAGES, NUMBER,
            )
        done += K // INPUTS


@gluon.jit
def product(
    x,  # [rows, K] bfloat16
    order,  # [slots] int32, see many.place
    ends,  # [BE] int32
    topk_weights,  # [slots] float32; not read by GATE_UP
    words, scales, bias,  # see layout.TiledMatrix
    out,  # [slots, R // 2] in the order of `order` (GATE_UP), else [slots, R]
    limit,
    GATE_UP: gl.constexpr,  # with the activation; else with the routing weights
    TOP_K: gl.constexpr,
    BE: gl.constexpr,
    R: gl.constexpr,
    K: gl.constexpr,
    HEIGHT: gl.constexpr,  # rows of weights of a group of warps
    COLUMNS: gl.constexpr,  # slots of a tile
    STAGES: gl.constexpr,
    COMPUTE_REGISTERS: gl.constexpr,  # of a thread; two groups of 128 compute and one fetches
    FETCH_REGISTERS: gl.constexpr,
):
    BLOCKS: gl.constexpr = (R + HEIGHT - 1) // HEIGHT
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, COLUMNS, INPUTS], gl.NVMMASharedLayout.get_default_for([COLUMNS, INPUTS], gl.bfloat16)
    )
    word_tiles = gl.allocate_shared_memory(gl.uint16, [STAGES, 2 * HEIGHT, WORDS], PLAIN)
    scale_tiles = gl.allocate_shared_memory(gl.int32, [STAGES, 2 * HEIGHT], LINE)
    full = barriers(STAGES, 128)  # threads of the producer
    empty = barriers(STAGES, 2)
    fence_async_shared()
    barrier()
    gl.warp_specialize(
        [
            (compute, (order, ends, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty,
                       GATE_UP, BE, BLOCKS, R, K, HEIGHT, COLUMNS, STAGES, 0)),
            (compute, (order, ends, topk_weights, bias, out, limit, x_tiles, word_tiles, scale_tiles, full, empty,
                       GATE_UP, BE, BLOCKS, R, K, HEIGHT, COLUMNS, STAGES, 1)),
            (fetch, (x, order, ends, words, scales, x_tiles, word_tiles, scale_tiles, full, empty,
                     TOP_K if GATE_UP else 0, BE, BLOCKS, R, K, HEIGHT, COLUMNS, STAGES)),
        ],
        [4, 4],
        [COMPUTE_REGISTERS, FETCH_REGISTERS],
    )


# fmt: on
