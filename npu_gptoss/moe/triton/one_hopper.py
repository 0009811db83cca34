"""A single token on Hopper, in Gluon: both projections of MXFP4 experts in one launch, weights through rings of copies.

One program a multiprocessor takes an equal share of the rows of all chosen experts, first of gate and up, then of down.
In it one warp asks the tensor memory accelerator for weights, those of `down` too while the first projection is still
computed, and GROUPS groups of four warps multiply. A group takes a unit of ROWS rows at a time; its warps share the
unit's inputs, tiles of 64 each, and add up their sums in shared memory. The groups wait for nothing but their own
weights. Between the projections all programs wait for each other, so there are no more of them than multiprocessors.

The products take the weights as they are opened, bfloat16 of 2 ** -126 times their value. Most of these are denormals,
which the tensor cores take exactly. So that no product is one, the inputs come times 2 ** 100 (they must stay below
2 ** 28), and the scales multiply the sums of each 32 inputs, which are fewer than the weights.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npu_gptoss.moe.activation import ALPHA as _ALPHA
from npu_gptoss.moe.triton import layout
from npu_gptoss.moe.triton.layout import TiledExperts, TiledMatrix

GROUPS = gl.constexpr(4)
WARPS = gl.constexpr(4)  # of a group
ROWS = gl.constexpr(16)  # of a unit: what a matrix instruction takes, a band of gate and one of up
TILES = gl.constexpr(16)  # of 64 inputs in a stage of a ring, a quarter for each warp
STAGES = gl.constexpr(4)  # of a ring; a unit's must fit, or groups that wait for each other would wait for ever
INPUTS = gl.constexpr(layout.INPUTS)
TILE_ROWS = gl.constexpr(layout.ROWS)
MOST_ROWS = gl.constexpr(layout.MOST_ROWS)
ALPHA = gl.constexpr(_ALPHA)
LARGE = gl.constexpr(2.0**100)
SMALL = gl.constexpr(2.0**-100)
SLOTS = gl.constexpr(32)  # no token has more
REGISTERS = 80  # of a thread: two fifths are left to the kernels before and after, which overlap with this one

# as device.OPEN_MXFP4, without its factors
_OPEN = gl.constexpr("""
{
.reg .b32 t, d;
and.b32 $0, $4, 0x81C081C0;
shl.b32 t, $4, 4;
and.b32 $1, t, 0x81C081C0;
shf.l.wrap.b32 t, $4, $4, 10;
and.b32 $2, t, 0x81C081C0;
shr.b32 t, $4, 2;
and.b32 d, t, 0x01000100;
shl.b32 t, $4, 6;
lop3.b32 $3, t, 0x80C080C0, d, 0xEA;
}
""")

# fmt: off
# (lists of twenty arguments are shorter to read filled than one a line)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def chosen(topk_ids, expert_map, slots, HAS_MAP: gl.constexpr):
    """Of each slot: its number, its local expert, how many slots with local experts are before it (itself: -1 without
    one). [SLOTS] each; and how many there are."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = gl.arange(0, SLOTS, EACH)
    expert = gl.load(topk_ids + slot, mask=slot < slots, other=-1).to(gl.int32)
    if HAS_MAP:
        expert = gl.load(expert_map + expert, mask=expert >= 0, other=-1).to(gl.int32)
    here = (expert >= 0).to(gl.int32)
    rank = gl.associative_scan(here, 0, _add) - 1
    return slot, expert, gl.where(expert >= 0, rank, -1), gl.sum(here, 0)


@gluon.jit
def of_rank(what, rank, number):
    return gl.sum(gl.where(rank == number, what, 0), 0)


@gluon.jit
def share(total, UNITS: gl.constexpr):
    """This program's first unit and the first beyond its last, of `total` experts with UNITS each."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    return program * (total * UNITS) // programs, (program + 1) * (total * UNITS) // programs


@gluon.jit
def fetch_projection(words, scales, expert, rank, total, rings, scale_rings, full, empty, units_before,
                     STEPS_BEFORE: gl.constexpr, K: gl.constexpr, R: gl.constexpr):
    """All groups' weights of one projection in the order of use; of the units before, each took STEPS_BEFORE stages."""
    UNITS: gl.constexpr = (R + ROWS - 1) // ROWS
    KEPT: gl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // TILE_ROWS)
    ALL: gl.constexpr = (K + INPUTS - 1) // INPUTS
    PAIRS: gl.constexpr = (ALL + 1) // 2
    STEPS: gl.constexpr = (ALL + TILES - 1) // TILES
    PARTS: gl.constexpr = TILE_ROWS // ROWS
    first, last = share(total, UNITS)
    number = -1
    mine = -1
    done = 0
    for base in range(first, last, GROUPS):
        for step in range(STEPS):
            for group in gl.static_range(GROUPS):
                unit = base + group
                if unit < last:
                    if unit // UNITS != number:
                        number = unit // UNITS
                        mine = of_rank(expert, rank, number)
                    row = mine * KEPT + unit % UNITS // PARTS
                    part = unit % UNITS % PARTS
                    at = (units_before - group + GROUPS - 1) // GROUPS * STEPS_BEFORE + done + step
                    stage = group * STAGES + at % STAGES
                    mbarrier.wait(empty.index(stage), (at // STAGES & 1) ^ 1)
                    mbarrier.expect(full.index(stage), TILES * ROWS * 32 + TILES // 2 * ROWS * 4)
                    tma.async_copy_global_to_shared(
                        words, [row * ALL + step * TILES, part * (ROWS // 4), 0], full.index(stage), rings.index(stage)
                    )
                    tma.async_copy_global_to_shared(
                        scales, [row * PAIRS + step * (TILES // 2), part, 0], full.index(stage),
                        scale_rings.index(stage),
                    )
        done += STEPS
    return last - first


@gluon.jit
def fetch(up_words, up_scales, down_words, down_scales, topk_ids, expert_map, slots, rings, scale_rings, full, empty,
          HAS_MAP: gl.constexpr, UP_K: gl.constexpr, UP_R: gl.constexpr, K: gl.constexpr, R: gl.constexpr):
    gdc_wait()
    _, expert, rank, total = chosen(topk_ids, expert_map, slots, HAS_MAP)
    units = fetch_projection(
        up_words, up_scales, expert, rank, total, rings, scale_rings, full, empty, gl.to_tensor(0), 0, UP_K, UP_R
    )
    fetch_projection(
        down_words, down_scales, expert, rank, total, rings, scale_rings, full, empty, units,
        (UP_K + INPUTS * TILES - 1) // (INPUTS * TILES), K, R,
    )


@gluon.jit
def tile_product(words, exponents, x, sums):
    """sums [WARPS, ROWS, 8] += a tile of weights of each warp @ its inputs, in each of the 8 columns the same."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    # a lane's words 4i to 4i + 3 of a row stand for the products' inputs 2i, 2i + 1, 2i + 8, 2i + 9
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 2, 0]], [[0, 0, 4], [0, 0, 8], [0, 0, 16], [0, 0, 32], [0, 1, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 4, 64],
    )
    X: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], [0, 0, 32]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]], [], [4, 8, 64],
    )
    w = words.load(WORDS).reshape([WARPS, ROWS, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([WARPS, ROWS, 16])
    a, b, c, d = gl.inline_asm_elementwise(
        _OPEN, "=&r,=&r,=&r,=r,r", [w], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True,
        pack=2,
    )
    low = gl.join(a, b).permute([0, 1, 3, 2]).reshape([WARPS, ROWS, 32])
    high = gl.join(c, d).permute([0, 1, 3, 2]).reshape([WARPS, ROWS, 32])
    row = gl.expand_dims(x.load(gl.SliceLayout(1, X)), 1)
    rows = gl.broadcast(row, gl.full([WARPS, 8, 64], 0.0, gl.bfloat16, X))[0]
    rows = rows.reshape([WARPS, 8, 2, 2, 4, 2, 2]).permute([0, 3, 5, 4, 6, 1, 2]).reshape([WARPS, 32, 8, 2])
    x_low, x_high = gl.split(rows)
    zeros = gl.zeros([WARPS, ROWS, 8], gl.float32, MMA)
    fields = gl.convert_layout(exponents.to(gl.int32), gl.SliceLayout(2, MMA), assert_trivial=True)
    first = gl.expand_dims((fields << 23) & 0x7F800000, 2).to(gl.float32, bitcast=True)
    second = gl.expand_dims((fields << 15) & 0x7F800000, 2).to(gl.float32, bitcast=True)
    sums += first * mma_v2(
        gl.convert_layout(low, LEFT, assert_trivial=True), gl.convert_layout(x_low, RIGHT, assert_trivial=True), zeros
    )
    sums += second * mma_v2(
        gl.convert_layout(high, LEFT, assert_trivial=True), gl.convert_layout(x_high, RIGHT, assert_trivial=True), zeros
    )
    return sums


@gluon.jit
def load_x(row, x_tiles, K: gl.constexpr, GROUP: gl.constexpr):
    """This group's share of a row of inputs, times LARGE, zero beyond its end."""
    STEPS: gl.constexpr = (K + INPUTS * TILES - 1) // (INPUTS * TILES) * (TILES // WARPS)
    TILE: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    warp = gl.expand_dims(gl.arange(0, WARPS, gl.SliceLayout(1, TILE)), 1)
    k = gl.expand_dims(gl.arange(0, INPUTS, gl.SliceLayout(0, TILE)), 0)
    for step in gl.static_range(GROUP, STEPS, GROUPS):
        at = (step * WARPS + warp) * INPUTS + k
        x = gl.load(row + at, mask=at < K, other=0.0)
        x_tiles.index(step).store((x.to(gl.float32) * LARGE).to(gl.bfloat16))


@gluon.jit
def compute_projection(x, weights, bias, out, limit, slot, expert, rank, total, rings, scale_rings, full, empty,
                       x_tiles, x_full, x_free, scratch, at, turns, UP: gl.constexpr, K: gl.constexpr, R: gl.constexpr,
                       GROUP: gl.constexpr):
    """A group's units of one projection. Returns how many stages it used and how many rows of inputs it saw, so far."""
    UNITS: gl.constexpr = (R + ROWS - 1) // ROWS
    STEPS: gl.constexpr = ((K + INPUTS - 1) // INPUTS + TILES - 1) // TILES
    EACH: gl.constexpr = TILES // WARPS
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1, 1], instr_shape=[1, 16, 8])
    SCALES: gl.constexpr = gl.DistributedLinearLayout(
        [[2, 0, 0], [4, 0, 0], [0, 0, 16]], [[0, 0, 0], [0, 0, 0], [0, 0, 2], [0, 0, 4], [0, 0, 8]],
        [[0, 0, 1], [1, 0, 0]], [], [8, 1, 32],
    )
    # gate and up of the same number in one thread
    SUMS: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0, 0], [0, 8, 0]], [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 1, 0], [2, 0, 0]], [[0, 2, 0], [0, 4, 0]], [],
        [4, 16, 8],
    )
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [0, 64]], [[0, 1], [0, 2], [0, 4], [0, 8], [2, 0]], [[0, 16], [0, 32]], [], [4, 128]
    )
    RESULT: gl.constexpr = gl.SliceLayout(0, SUMS)
    first, last = share(total, UNITS)
    for number in range(first // UNITS, (last + UNITS - 1) // UNITS):
        mine = of_rank(expert, rank, number)
        which = of_rank(slot, rank, number)
        # the groups share the inputs: all are done with the last ones, then each brings some of the next
        gl.thread_barrier()
        mbarrier.arrive(x_free, count=1)
        mbarrier.wait(x_free, turns & 1)
        load_x(x if UP else x + which * K, x_tiles, K, GROUP)
        gl.thread_barrier()
        mbarrier.arrive(x_full, count=1)
        mbarrier.wait(x_full, turns & 1)
        turns += 1
        weight = gl.load(weights + which)
        begin = gl.maximum(first, number * UNITS)
        # a group's units are those that are GROUP beyond a multiple of GROUPS from the program's first
        begin += (GROUP + GROUPS - (begin - first) % GROUPS) % GROUPS
        for each in range(begin, gl.minimum(last, (number + 1) * UNITS), GROUPS):
            unit = each - number * UNITS
            row = unit * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, RESULT))
            add = gl.load(bias + mine * R + row, mask=row < R, other=0.0)
            sums = gl.zeros([WARPS, ROWS, 8], gl.float32, MMA)
            for step in range(STEPS):
                stage = GROUP * STAGES + at % STAGES
                mbarrier.wait(full.index(stage), at // STAGES & 1)
                tiles = rings.index(stage)
                fields = scale_rings.index(stage).load(SCALES).reshape([2, 2, 2, ROWS, 2]).permute([2, 4, 3, 0, 1])
                even, odd = gl.split(fields.reshape([WARPS, ROWS, 2, 2]))  # by the lowest bit of a warp's tile's number
                first_, third = gl.split(even)
                second, fourth = gl.split(odd)
                sums = tile_product(tiles.slice(0, 4), first_, x_tiles.index(step * EACH), sums)
                sums = tile_product(tiles.slice(4, 4), second, x_tiles.index(step * EACH + 1), sums)
                sums = tile_product(tiles.slice(8, 4), third, x_tiles.index(step * EACH + 2), sums)
                sums = tile_product(tiles.slice(12, 4), fourth, x_tiles.index(step * EACH + 3), sums)
                gl.thread_barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                at += 1
            scratch.store(sums.reshape([WARPS, ROWS * 8]))
            gl.thread_barrier()
            y = gl.convert_layout(scratch.load(FLAT).reshape([WARPS, ROWS, 8]), SUMS, assert_trivial=True)
            y = gl.sum(y, 0) * SMALL + gl.expand_dims(add.to(gl.float32), 1)
            if UP:
                gate, up = gl.split(y.reshape([2, 8, 8]).permute([1, 2, 0]))
                gate = gl.minimum(gate, limit)
                up = gl.minimum(gl.maximum(up, -limit), limit)
                z = (up + 1) * gate / (1 + gl.exp(gate * -ALPHA))
                Z: gl.constexpr = z.type.layout
                at_z = unit * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, Z)), 1)
                column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, Z)), 0)
                gl.store(out + which * (R // 2) + at_z + column * 0, z.to(out.dtype.element_ty),
                         mask=(column < 1) & (at_z < R // 2))
            else:
                column = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, RESULT)), 0)
                at_y = gl.expand_dims(row, 1)
                gl.store(out + which * R + at_y + column * 0, y * weight, mask=(column < 1) & (at_y < R))
    return at, turns


@gluon.jit
def compute(x, topk_ids, expert_map, weights, up_bias, bias, inner, shares, arrived, slots, limit, rings, scale_rings,
            full, empty, x_tiles, x_full, x_free, scratches, HAS_MAP: gl.constexpr, UP_K: gl.constexpr,
            UP_R: gl.constexpr, K: gl.constexpr, R: gl.constexpr, GROUP: gl.constexpr):
    gdc_wait()
    gdc_launch_dependents()
    slot, expert, rank, total = chosen(topk_ids, expert_map, slots, HAS_MAP)
    scratch = scratches.index(GROUP)
    at, turns = compute_projection(
        x, weights, up_bias, inner, limit, slot, expert, rank, total, rings, scale_rings, full, empty, x_tiles, x_full,
        x_free, scratch, gl.to_tensor(0), gl.to_tensor(0), True, UP_K, UP_R, GROUP,
    )
    # all groups of all programs meet, then the last one to leave makes the counters zeros again
    members = gl.num_programs(0) * GROUPS
    gl.thread_barrier()
    gl.atomic_add(arrived, 1, sem="acq_rel")
    while gl.atomic_add(arrived, 0, sem="acquire") < members:
        pass
    gl.thread_barrier()
    if gl.atomic_add(arrived + 1, 1, sem="acq_rel") == members - 1:
        gl.store(arrived, 0)
        gl.store(arrived + 1, 0)
    compute_projection(
        inner, weights, bias, shares, limit, slot, expert, rank, total, rings, scale_rings, full, empty, x_tiles,
        x_full, x_free, scratch, at, turns, False, K, R, GROUP,
    )


@gluon.jit
def experts_kernel(
    x,  # [UP_K] bfloat16
    topk_ids,  # [slots]
    expert_map,  # [global experts] or unused
    weights,  # [slots] fp32
    up_bias,
    bias,
    inner,  # [slots, K] bfloat16, scratch
    shares,  # [slots, R] fp32, out
    arrived,  # [2] int32, zeros, and again when it ends
    slots,
    limit,
    up_words,  # descriptors, see `descriptors`
    up_scales,
    down_words,
    down_scales,
    HAS_MAP: gl.constexpr,
    UP_K: gl.constexpr,
    UP_R: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
):
    MOST: gl.constexpr = (max(UP_K, K) + INPUTS * TILES - 1) // (INPUTS * TILES) * (TILES // WARPS)
    rings = gl.allocate_shared_memory(gl.uint16, [GROUPS * STAGES, TILES, ROWS // 4, 64], up_words.layout)
    scale_rings = gl.allocate_shared_memory(gl.uint16, [GROUPS * STAGES, TILES // 2, 1, ROWS * 2], up_scales.layout)
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [MOST, WARPS, INPUTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    scratches = gl.allocate_shared_memory(
        gl.float32, [GROUPS, WARPS, ROWS * 8], gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    )
    full = gl.allocate_shared_memory(gl.int64, [GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [GROUPS * STAGES, 1], mbarrier.MBarrierLayout())
    x_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(GROUPS * STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    mbarrier.init(x_full, count=GROUPS)
    mbarrier.init(x_free, count=GROUPS)
    fence_async_shared()
    gl.thread_barrier()
    # the arguments stand here each time, because a tuple with a name would turn its constants into values
    gl.warp_specialize(
        [
            (compute, (
                x, topk_ids, expert_map, weights, up_bias, bias, inner, shares, arrived, slots, limit, rings,
                scale_rings, full, empty, x_tiles, x_full, x_free, scratches, HAS_MAP, UP_K, UP_R, K, R, 0,
            )),
            (compute, (
                x, topk_ids, expert_map, weights, up_bias, bias, inner, shares, arrived, slots, limit, rings,
                scale_rings, full, empty, x_tiles, x_full, x_free, scratches, HAS_MAP, UP_K, UP_R, K, R, 1,
            )),
            (compute, (
                x, topk_ids, expert_map, weights, up_bias, bias, inner, shares, arrived, slots, limit, rings,
                scale_rings, full, empty, x_tiles, x_full, x_free, scratches, HAS_MAP, UP_K, UP_R, K, R, 2,
            )),
            (compute, (
                x, topk_ids, expert_map, weights, up_bias, bias, inner, shares, arrived, slots, limit, rings,
                scale_rings, full, empty, x_tiles, x_full, x_free, scratches, HAS_MAP, UP_K, UP_R, K, R, 3,
            )),
            (fetch, (
                up_words, up_scales, down_words, down_scales, topk_ids, expert_map, slots, rings, scale_rings, full,
                empty, HAS_MAP, UP_K, UP_R, K, R,
            )),
        ],
        [4, 4, 4, 1],
        [80, 80, 80, 56],
    )


# fmt: on

_WORDS_LAYOUT = gl.NVMMASharedLayout(128, 16, 3)
_SCALES_LAYOUT = gl.NVMMASharedLayout(64, 16, 3)


def takes(experts: TiledExperts, slots: int) -> bool:
    """Whether these experts are a case for this kernel, on the GPU that it is for."""
    most = STAGES.value * TILES.value * layout.INPUTS
    matrices = experts.gate_up, experts.down
    return experts.format == "mxfp4" and slots <= SLOTS.value and all(each.inputs <= most for each in matrices)


def descriptors(matrix: TiledMatrix) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Of words and scales: a stage's tiles, of each the rows of a unit."""
    words = matrix.words.view(-1, layout.ROWS // 4, 64)
    scales = matrix.scales.view(torch.int16).view(torch.uint16).view(-1, layout.ROWS // ROWS.value, ROWS.value * 2)
    return (
        TensorDescriptor.from_tensor(words, [TILES.value, ROWS.value // 4, 64], _WORDS_LAYOUT),
        TensorDescriptor.from_tensor(scales, [TILES.value // 2, 1, ROWS.value * 2], _SCALES_LAYOUT),
    )


@functools.cache
def _counters(device: torch.device) -> torch.Tensor:
    """Zeros that every launch leaves zero again: one allocation serves all, as long as they run in one stream."""
    return torch.zeros(2, dtype=torch.int32, device=device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shares_of(
    hidden: torch.Tensor,
    experts: TiledExperts,
    expert_map: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    swiglu_limit: float,
) -> torch.Tensor:
    """hidden [1, hidden size], topk [1, k] -> the slots' weighted results [k, 1, hidden size] float32; those of slots
    without an expert here are whatever memory held."""
    gate_up, down, slots = experts.gate_up, experts.down, topk_ids.numel()
    inner = hidden.new_empty(slots, down.inputs)
    shares = torch.empty(slots, 1, down.rows, dtype=torch.float32, device=hidden.device)
    experts_kernel[(_multiprocessors(hidden.device),)](
        hidden,
        topk_ids,
        expert_map,
        topk_weights,
        gate_up.bias,
        down.bias,
        inner,
        shares,
        _counters(hidden.device),
        slots,
        swiglu_limit,
        *descriptors(gate_up),
        *descriptors(down),
        HAS_MAP=experts.expert_map is not None,
        UP_K=gate_up.inputs,
        UP_R=gate_up.rows,
        K=down.inputs,
        R=down.rows,
        num_warps=WARPS.value,
        maxnreg=REGISTERS,
        launch_pdl=True,
    )
    return shares
