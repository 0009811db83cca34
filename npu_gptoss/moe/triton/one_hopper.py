"""A single token's MXFP4 experts on Hopper, in Gluon: weights straight into registers, most of them before the wait.

A tile of the layout lies in memory as a warp's products want it, so its words go from memory to the registers that are
multiplied, without shared memory and without a barrier. `down` asks for its weights before it waits for `gate_up`, and
keeps them in registers meanwhile: the memory does not stand still between the two, and a multiprocessor that has little
of the first begins with the second.

A token alone fills one column of a product in eight. The others are used for the scales: each of the eight groups of 32
inputs of a step has a column of its own, where the inputs of the other groups are zeros, so that a product gives the
sums of each group apart and eight of a row's scales multiply eight sums, instead of 256 weights. The weights are taken
as they are opened, bfloat16 of 2 ** -126 times their value; most are denormals, which the tensor cores take exactly. So
that no product is one, the inputs come times 2 ** 64 (they must stay below 2 ** 63, and so must the sums).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npu_gptoss.kernels.gluon_names import barrier, reinterpret
from npu_gptoss.moe.activation import ALPHA as _ALPHA
from npu_gptoss.moe.triton import layout
from npu_gptoss.moe.triton.layout import Call
from npu_gptoss.moe.triton.tuned import OneTiles

INPUTS = gl.constexpr(layout.INPUTS)
ROWS = gl.constexpr(layout.ROWS)
MOST_ROWS = gl.constexpr(layout.MOST_ROWS)
ALPHA = gl.constexpr(_ALPHA)
LARGE = gl.constexpr(2.0**64)
SMALL = gl.constexpr(2.0**-64)
GROUPS = gl.constexpr(8)  # of 32 inputs in a step: the columns of a product
STEP = gl.constexpr(4)  # tiles of inputs that have them
WORDS = gl.constexpr(16)  # of a row in a tile

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


@gluon.constexpr_function
def doublings(base, first, end):
    """Steps of a layout along one dimension: first times base, twice that and so on, below end."""
    return [[each * n for each in base] for n in (2**i for i in range(12)) if first <= n < end]


@gluon.constexpr_function
def words_layout(warps):
    """[16 rows a warp, 64 words]: four lanes share a row; each has 8 words side by side of every two tiles' 32."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        doublings([16, 0], 1, warps), [], [16 * warps, 64],
    )


@gluon.constexpr_function
def inputs_layout(warps):
    """[tile of two, group, 32 inputs]: a lane has its column's group, and the half of it that its words stand for."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 16]], [[0, 0, 8], [1, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        doublings([0, 0, 0], 1, warps), [], [2, 8, 32],
    )


@gluon.constexpr_function
def sums_layout(warps):
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[warps, 1], instr_shape=[16, 8])


@gluon.constexpr_function
def steps_of(inputs, splits):
    """Steps of the longest of so many shares of the inputs."""
    steps = -(-inputs // (INPUTS.value * STEP.value))
    return -(-steps // splits)


@gluon.constexpr_function
def power_of_2(n):
    return 1 << (n - 1).bit_length()


@gluon.jit
def local_expert(topk_ids, expert_map, slot, HAS_MAP: gl.constexpr):
    """-1 for padding and for experts of other ranks."""
    expert = gl.load(topk_ids + slot).to(gl.int32)
    if HAS_MAP:
        expert = gl.load(expert_map + expert, mask=expert >= 0, other=-1).to(gl.int32)
    return expert


@gluon.jit
def places(words, scales, expert, first_row, R: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Pointers to the first step's words [rows, 64] and bytes of exponents [rows, 8]."""
    TILES: gl.constexpr = (K + INPUTS - 1) // INPUTS
    PAIRS: gl.constexpr = (TILES + 1) // 2
    KEPT: gl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)
    LEFT: gl.constexpr = words_layout(WARPS)
    SUMS: gl.constexpr = sums_layout(WARPS)
    tile = (expert * KEPT + first_row // ROWS).to(gl.int64)
    inside = first_row % ROWS
    i = gl.expand_dims(gl.arange(0, 16 * WARPS, gl.SliceLayout(1, LEFT)), 1)
    j = gl.expand_dims(gl.arange(0, STEP * WORDS, gl.SliceLayout(0, LEFT)), 0)
    word = words + tile * (TILES * ROWS * WORDS) + inside * WORDS
    word += i * WORDS + j // WORDS * (ROWS * WORDS) + j % WORDS
    i = gl.expand_dims(gl.arange(0, 16 * WARPS, gl.SliceLayout(1, SUMS)), 1)
    n = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, SUMS)), 0)
    scale = scales + tile * (PAIRS * ROWS * 4) + inside * 4
    return word, scale + (i * 4 + n // 4 * (ROWS * 4) + n % 4)


@gluon.jit
def load_step(word, scale, step, K: gl.constexpr, WARPS: gl.constexpr):
    """A step's words [rows, 64] and exponents [rows, 8]; zeros beyond the inputs."""
    TILES: gl.constexpr = (K + INPUTS - 1) // INPUTS
    j = gl.expand_dims(gl.arange(0, STEP * WORDS, gl.SliceLayout(0, words_layout(WARPS))), 0)
    n = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(0, sums_layout(WARPS))), 0)
    w = gl.load(word + step * (STEP * ROWS * WORDS), mask=step * STEP + j // WORDS < TILES, other=0)
    e = gl.load(scale + step * (STEP // 2 * ROWS * 4), mask=step * STEP + n // 4 * 2 < TILES, other=0)
    return w, e


@gluon.jit
def load_inputs(x, x_tiles, begin, STEPS: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """The inputs of STEPS steps from `begin`, times LARGE, into shared memory; zeros beyond the last."""
    EACH: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [WARPS, 1], [1, 0])
    ALL: gl.constexpr = power_of_2(STEPS) * GROUPS
    group = gl.expand_dims(gl.arange(0, ALL, gl.SliceLayout(1, EACH)), 1)
    k = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, EACH)), 0)
    at = begin * (STEP * INPUTS) + group * 32 + k
    found = gl.load(x + at, mask=(at < K) & (group < STEPS * GROUPS), other=0.0)
    reinterpret(x_tiles, gl.bfloat16, [ALL, 32], x_tiles.layout).store((found.to(gl.float32) * LARGE).to(gl.bfloat16))


@gluon.jit
def left(codes, WARPS: gl.constexpr):
    """[rows, 32 words], one code of each, -> a product's left side. Its inputs in order: a lane's words 4 to 7 after 0
    to 3, of these 2 and 3 after 0 and 1; between them the tile, then the half of its words."""
    codes = codes.reshape([16 * WARPS, 2, 2, 2, 2, 2]).permute([0, 3, 4, 1, 2, 5]).reshape([16 * WARPS, 32])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, sums_layout(WARPS), 2), assert_trivial=True)


@gluon.jit
def right(x, PAIR: gl.constexpr, HALF: gl.constexpr, WARPS: gl.constexpr):
    """x [2, 8, 32] -> the right sides [32, 8] for two codes of a word, the first two or (HALF) the others, of the
    step's first two tiles or (PAIR) the others: zeros but where a column's group is theirs."""
    EACH: gl.constexpr = inputs_layout(WARPS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, sums_layout(WARPS), 2)
    tile = gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, EACH))), 1), 2)
    group = gl.expand_dims(gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, EACH))), 0), 2)
    bits = gl.where(group == PAIR * 4 + tile * 2 + HALF, -1, 0)
    bits = gl.broadcast(bits, gl.full([2, 8, 32], 0, gl.int32, EACH))[0]
    # two inputs at once; the second's bits are the same
    own = gl.inline_asm_elementwise(
        "and.b32 $0, $1, $2; // $3", "=r,r,r,r", [x, bits], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    # tile, group, code, half of a tile's words, a word's place in it -> as `left` has them
    own = own.reshape([2, 8, 2, 2, 2, 2, 2]).permute([4, 5, 0, 3, 6, 1, 2]).reshape([32, 8, 2])
    one, other = gl.split(own)
    return gl.convert_layout(one, RIGHT, assert_trivial=True), gl.convert_layout(other, RIGHT, assert_trivial=True)


@gluon.jit
def multiply(w, e, x_tile, sums, WARPS: gl.constexpr):
    """sums [rows, 8] += a step."""
    EACH: gl.constexpr = inputs_layout(WARPS)
    x = gl.expand_dims(x_tile.load(gl.SliceLayout(0, EACH)), 0)
    x = gl.broadcast(x, gl.full([2, 8, 32], 0.0, gl.bfloat16, EACH))[0]
    codes = gl.inline_asm_elementwise(
        _OPEN, "=&r,=&r,=&r,=r,r", [w], dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=2
    )
    step = gl.zeros([16 * WARPS, GROUPS], gl.float32, sums_layout(WARPS))
    for half in gl.static_range(2):
        one_first, one_last = gl.split(codes[2 * half].reshape([16 * WARPS, 2, 32]).permute([0, 2, 1]))
        other_first, other_last = gl.split(codes[2 * half + 1].reshape([16 * WARPS, 2, 32]).permute([0, 2, 1]))
        x_one, x_other = right(x, 0, half, WARPS)
        step = mma_v2(left(one_first, WARPS), x_one, step)
        step = mma_v2(left(other_first, WARPS), x_other, step)
        x_one, x_other = right(x, 1, half, WARPS)
        step = mma_v2(left(one_last, WARPS), x_one, step)
        step = mma_v2(left(other_last, WARPS), x_other, step)
    # the byte is a float's exponent field
    return sums + step * (e.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def products(word, scale, x, begin, WAIT: gl.constexpr, STEPS: gl.constexpr, DEEP: gl.constexpr, K: gl.constexpr,
             WARPS: gl.constexpr):
    """The rows' sums over STEPS steps from `begin`; DEEP of them are under way at once, and before the WAIT."""
    ring = ()
    for at in gl.static_range(DEEP):
        ring += (load_step(word, scale, begin + at, K, WARPS),)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    x_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [power_of_2(STEPS), GROUPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    load_inputs(x, x_tiles, begin, STEPS, K, WARPS)
    barrier()  # here, or the compiler puts one into the loop
    sums = gl.zeros([16 * WARPS, GROUPS], gl.float32, sums_layout(WARPS))
    for first in range(0, STEPS - DEEP, DEEP):
        after = ()
        for at in gl.static_range(DEEP):
            sums = multiply(ring[at][0], ring[at][1], x_tiles.index(first + at), sums, WARPS)
            after += (load_step(word, scale, begin + first + DEEP + at, K, WARPS),)
        ring = after
    LAST: gl.constexpr = (STEPS - 1) // DEEP * DEEP
    for at in gl.static_range(STEPS - LAST):
        sums = multiply(ring[at][0], ring[at][1], x_tiles.index(LAST + at), sums, WARPS)
    return gl.sum(sums, 1) * SMALL


@gluon.jit
def gate_up(x, topk_ids, expert_map, words, scales, bias, inner, limit, HAS_MAP: gl.constexpr, R: gl.constexpr,
            K: gl.constexpr, DEEP: gl.constexpr):
    """`few.gate_up` of a single token; scales as bytes."""
    WARPS: gl.constexpr = gl.num_warps()
    gdc_wait()
    gdc_launch_dependents()
    first_row = gl.program_id(0) * (16 * WARPS)
    slot = gl.program_id(1)
    expert = local_expert(topk_ids, expert_map, slot, HAS_MAP)
    if expert >= 0:
        word, scale = places(words, scales, expert, first_row, R, K, WARPS)
        sums = products(word, scale, x, 0, False, steps_of(K, 1), DEEP, K, WARPS)
        m = first_row + gl.arange(0, 16 * WARPS, sums.type.layout)
        sums += gl.load(bias + expert * R + m, mask=m < R, other=0.0).to(gl.float32)
        gate, up = gl.split(sums.reshape([WARPS, 2, 8]).permute([0, 2, 1]))
        gate = gl.minimum(gate.reshape([8 * WARPS]), limit)
        up = gl.minimum(gl.maximum(up.reshape([8 * WARPS]), -limit), limit)
        out = (up + 1) * gate / (1 + gl.exp(gate * -ALPHA))
        row = first_row // 2 + gl.arange(0, 8 * WARPS, out.type.layout)
        gl.store(inner + slot * (R // 2) + row, out.to(inner.dtype.element_ty), mask=row < R // 2)


@gluon.jit
def down(inner, topk_ids, expert_map, topk_weights, words, scales, bias, shares, HAS_MAP: gl.constexpr,
         R: gl.constexpr, K: gl.constexpr, SPLITS: gl.constexpr, DEEP: gl.constexpr):
    """`few.down` of a single token; scales as bytes. Ids may be read before the wait for the reason given there."""
    WARPS: gl.constexpr = gl.num_warps()
    STEPS: gl.constexpr = steps_of(K, SPLITS)
    first_row = gl.program_id(0) * (16 * WARPS)
    slot = gl.program_id(1)
    split = gl.program_id(2)
    expert = local_expert(topk_ids, expert_map, slot, HAS_MAP)
    if expert >= 0:
        word, scale = places(words, scales, expert, first_row, R, K, WARPS)
        sums = products(word, scale, inner + slot * K, split * STEPS, True, STEPS, DEEP, K, WARPS)
        m = first_row + gl.arange(0, 16 * WARPS, sums.type.layout)
        sums += gl.load(bias + expert * R + m, mask=(m < R) & (split == 0), other=0.0).to(gl.float32)
        gl.store(shares + (slot * SPLITS + split) * R + m, sums * gl.load(topk_weights + slot), mask=m < R)
    else:
        gdc_wait()
        gdc_launch_dependents()


# fmt: on


def shares_of(call: Call, shape: OneTiles) -> torch.Tensor:
    """A single token's call -> the slots' weighted results [k, splits, hidden size] float32, whose splits are still to
    be added; those of slots without an expert here are whatever memory held."""
    first, second, slots = call.experts.gate_up, call.experts.down, call.slots
    rows = 16 * shape.warps
    inner = call.hidden.new_empty(slots, second.inputs)
    shares = torch.empty(slots, shape.splits, second.rows, dtype=torch.float32, device=call.hidden.device)
    common = {"HAS_MAP": call.has_map, "num_warps": shape.warps, "maxnreg": shape.registers, "launch_pdl": True}
    scales, routing = [m.scales.view(torch.uint8) for m in (first, second)], (call.topk_ids, call.expert_map)
    gate_up[(-(-first.rows // rows), slots)](
        *(call.hidden, *routing, first.words, scales[0], first.bias, inner, call.swiglu_limit),
        R=first.rows,
        K=first.inputs,
        DEEP=shape.deep,
        **common,
    )
    down[(-(-second.rows // rows), slots, shape.splits)](
        *(inner, *routing, call.topk_weights, second.words, scales[1], second.bias, shares),
        R=second.rows,
        K=second.inputs,
        SPLITS=shape.splits,
        DEEP=shape.down_deep,
        **common,
    )
    return shares
