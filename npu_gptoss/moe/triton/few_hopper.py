"""A decode batch's MXFP4 experts on Hopper, in Gluon: weights straight into registers, their scales onto sums.

As in `one_hopper`, a thread's words go from memory to the registers that are multiplied, several steps ahead, without
shared memory; they are taken as they are opened, and the inputs come times 2 ** 64. Here the eight columns of a product
are an expert's slots. A product has the inputs of one group of 32 only, so four lanes share a row of one tile of the
layout, and a row's scale multiplies what the group adds to its sums: two instructions for 256 weights instead of four.
Rows of inputs are staged in shared memory, once for a program, in the order in which a lane wants them.

Grids and lists are those of `few`, which `assign` makes for both.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npu_gptoss.kernels.gluon_names import add, barrier, reinterpret
from npu_gptoss.moe.triton.layout import Call
from npu_gptoss.moe.triton.one_hopper import _OPEN as OPEN
from npu_gptoss.moe.triton.one_hopper import ALPHA, INPUTS, MOST_ROWS, ROWS, SMALL, doublings, sums_layout
from npu_gptoss.moe.triton.tuned import FewTiles

COLUMNS = gl.constexpr(8)  # of a product
WORDS = gl.constexpr(8)  # of a row in a tile, 32 bits each
CHUNK = gl.constexpr(32)  # groups of inputs that are staged together
FIELD = gl.constexpr(0x7F800000)  # a float's exponent
# 2 ** 64
TIMES_LARGE = gl.constexpr("{ .reg .b32 s; mov.b32 s, 0x5F805F80; mul.rn.bf16x2 $0, $1, s; }")

# fmt: off


@gluon.constexpr_function
def words_layout(warps, rows):
    """[rows, 8 pairs of words of a tile]: four lanes share a row, each has two pairs side by side."""
    return gl.DistributedLinearLayout(
        [[0, 1], [8, 0], *doublings([16, 0], warps, rows // 16)],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]], doublings([16, 0], 1, warps), [], [rows, 8],
    )


@gluon.constexpr_function
def staging_layout(warps, groups):
    """[groups, 2 slots, 32 inputs]: a thread reads 4 inputs and those 16 further on, which lie together then."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 16], *doublings([1, 0, 0], 4 * warps, groups)],
        [[0, 0, 4], [0, 0, 8], [0, 1, 0], [1, 0, 0], [2, 0, 0]], doublings([1, 0, 0], 4, 4 * warps), [],
        [groups, 2, 32],
    )


@gluon.constexpr_function
def inputs_layout(warps, slots):
    """[8 // slots, slots, 32 inputs as staged]: columns beyond the slots repeat them."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 8], [0, 0, 16], *doublings([0, 1, 0], 1, slots), *doublings([1, 0, 0], 1, 8 // slots)],
        doublings([0, 0, 0], 1, warps), [], [8 // slots, slots, 32],
    )


@gluon.constexpr_function
def chunks_of(inputs):
    """Chunks that hold all groups of all steps of two tiles."""
    return -(-(-(-inputs // (2 * INPUTS.value)) * 4) // CHUNK.value)


@gluon.jit
def chosen_expert(counts, EXPERTS: gl.constexpr, BE: gl.constexpr):
    """This program's expert and its number of slots, like `few._mine`. BE: at least 32, so that each warp finds the
    expert alone."""
    e = gl.arange(0, BE, gl.BlockedLayout([BE // 32], [32], [gl.num_warps()], [0]))
    count = gl.load(counts + e, mask=e < EXPERTS, other=0)
    rank = gl.associative_scan((count > 0).to(gl.int32), 0, add) - 1
    own = (count > 0) & (rank == gl.program_id(1))
    return gl.sum(gl.where(own, e, 0), 0), gl.sum(gl.where(own, count, 0), 0)


@gluon.jit
def load_step(word, scale, step, K: gl.constexpr):
    """A step's words, two tiles [rows, 16], and exponents [rows], four in each. Values beyond the last step are not
    read and may be anything: words always open to numbers, whose inputs are zeros."""
    TILES: gl.constexpr = (K + INPUTS - 1) // INPUTS
    w = word + step * (2 * ROWS * WORDS)
    first = gl.load(w, mask=step * 2 < TILES)
    second = gl.load(w + ROWS * WORDS, mask=step * 2 + 1 < TILES)
    return first, second, gl.load(scale + step * ROWS, mask=step * 2 < TILES)


@gluon.jit
def left(codes, BM: gl.constexpr):
    """[rows, 8 pairs of words], one code of each, -> a product's left side: the lanes' first pairs, then the others."""
    both = gl.join((codes & 0xFFFF).to(gl.int16), (codes >> 16).to(gl.int16)).to(gl.bfloat16, bitcast=True)
    codes = both.reshape([BM, 4, 2, 2]).permute([0, 2, 1, 3]).reshape([BM, 16])
    return gl.convert_layout(codes, gl.DotOperandLayout(0, sums_layout(gl.num_warps()), 2), assert_trivial=True)


@gluon.jit
def right(x_group, SLOTS: gl.constexpr):
    """A group's inputs [slots, 32] -> the right sides [16, 8] for the two codes of its words."""
    EACH: gl.constexpr = inputs_layout(gl.num_warps(), SLOTS)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, sums_layout(gl.num_warps()), 2)
    x = gl.expand_dims(x_group.load(gl.SliceLayout(0, EACH)), 0)
    x = gl.broadcast(x, gl.full([COLUMNS // SLOTS, SLOTS, 32], 0.0, gl.bfloat16, EACH))[0]
    # lane, code, pair of words, word
    x = x.reshape([COLUMNS // SLOTS, SLOTS, 4, 2, 2, 2]).permute([4, 2, 5, 0, 1, 3]).reshape([16, COLUMNS, 2])
    one, other = gl.split(x)
    return gl.convert_layout(one, RIGHT, assert_trivial=True), gl.convert_layout(other, RIGHT, assert_trivial=True)


@gluon.jit
def multiply(words, fields, x_groups, step, sums, SLOTS: gl.constexpr, BM: gl.constexpr):
    """sums [rows, 8] += a step: two tiles, two groups of each."""
    for tile in gl.static_range(2):
        codes = gl.inline_asm_elementwise(
            OPEN, "=&r,=&r,=&r,=r,r", [words[tile]], dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True,
            pack=1,
        )
        for half in gl.static_range(2):
            one, other = right(x_groups.index(step * 4 + tile * 2 + half), SLOTS)
            group = gl.zeros([BM, COLUMNS], gl.float32, sums_layout(gl.num_warps()))
            group = mma_v2(left(codes[2 * half], BM), one, group)
            group = mma_v2(left(codes[2 * half + 1], BM), other, group)
            if tile * 2 + half == 3:
                field = fields >> 1
            else:
                field = fields << (23 - 8 * (tile * 2 + half))
            sums += group * gl.expand_dims((field & FIELD).to(gl.float32, bitcast=True), 1)
    return sums


@gluon.jit
def load_chunk(x, lists, expert, slots, begin, count, AT: gl.constexpr, PER_ROW: gl.constexpr, K: gl.constexpr):
    """Loads the inputs of chunk AT of two of the expert's slots -> [groups, 2, 32]; zeros where there is none, and
    beyond the end."""
    EACH: gl.constexpr = staging_layout(gl.num_warps(), CHUNK)
    n = begin + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(2, EACH))), 0), 2)
    slot = gl.load(lists + expert * slots + n, mask=n < count, other=0)
    group = gl.expand_dims(gl.expand_dims(gl.arange(0, CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, EACH))), 1), 2)
    k = gl.expand_dims(gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, EACH))), 0), 1)
    k += (AT * CHUNK + group) * 32
    mask = n < count
    if (AT + 1) * (CHUNK * 32) > K:
        mask = mask & (k < K)
    return gl.load(x + (slot // PER_ROW).to(gl.int64) * K + k, mask=mask, other=0.0)


@gluon.jit
def store_chunk(found, x_chunk, PAIR: gl.constexpr):
    inputs = gl.inline_asm_elementwise(TIMES_LARGE, "=r,r", [found], dtype=gl.bfloat16, is_pure=True, pack=2)
    # a lane's inputs for the first codes of its words, then those for the second
    inputs = inputs.reshape([CHUNK, 2, 2, 4, 4]).permute([0, 1, 3, 2, 4]).reshape([CHUNK, 2, 32])
    x_chunk.slice(PAIR, 2, 1).store(inputs)


@gluon.jit
def stage(x, lists, expert, slots, done, count, x_chunks, PER_ROW: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr):
    """The inputs of SLOTS of the expert's slots from `done` on, times LARGE, into shared memory. Two at a time; where
    both are missing, memory stays unchanged: no program reads their columns."""
    for pair in gl.static_range(0, SLOTS, 2):
        if done + pair < count:
            found = ()
            for at in gl.static_range(chunks_of(K)):
                found += (load_chunk(x, lists, expert, slots, done + pair, count, at, PER_ROW, K),)
            for at in gl.static_range(chunks_of(K)):
                store_chunk(found[at], x_chunks.index(at), pair)


@gluon.jit
def products(x, lists, expert, slots, done, count, words, scales, bias, first_row, x_chunks, WAIT: gl.constexpr,
             PER_ROW: gl.constexpr, R: gl.constexpr, K: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr,
             DEEP: gl.constexpr):
    """BM rows of weights by the inputs of SLOTS slots, plus bias -> [BM, 8]; DEEP steps are under way at once, and
    before the WAIT."""
    TILES: gl.constexpr = (K + INPUTS - 1) // INPUTS
    STEPS: gl.constexpr = (TILES + 1) // 2
    KEPT: gl.constexpr = (R + MOST_ROWS - 1) // MOST_ROWS * (MOST_ROWS // ROWS)
    LEFT: gl.constexpr = words_layout(gl.num_warps(), BM)
    SUMS: gl.constexpr = sums_layout(gl.num_warps())
    tile = (expert * KEPT + first_row // ROWS).to(gl.int64)
    inside = first_row % ROWS
    i = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, LEFT)), 1)
    i = i // ROWS * (TILES * ROWS * WORDS) + i % ROWS * WORDS  # tiles of the layout one after the other
    j = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(0, LEFT)), 0)
    word = words + tile * (TILES * ROWS * WORDS) + inside * WORDS + (i + j)
    i = gl.arange(0, BM, gl.SliceLayout(1, SUMS))
    scale = scales + tile * (STEPS * ROWS) + inside + (i // ROWS * (STEPS * ROWS) + i % ROWS)
    ring = ()
    for at in gl.static_range(DEEP):
        ring += (load_step(word, scale, at, K),)
    if WAIT:
        gdc_wait()
        gdc_launch_dependents()
    stage(x, lists, expert, slots, done, count, x_chunks, PER_ROW, K, SLOTS)
    barrier()  # here, or the compiler puts one into the loop
    x_groups = reinterpret(
        x_chunks, gl.bfloat16, [chunks_of(K) * CHUNK, SLOTS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    sums = gl.zeros([BM, COLUMNS], gl.float32, SUMS)
    for first in range(0, STEPS - DEEP, DEEP):
        after = ()
        for at in gl.static_range(DEEP):
            sums = multiply(ring[at], ring[at][2], x_groups, first + at, sums, SLOTS, BM)
            after += (load_step(word, scale, first + DEEP + at, K),)
        ring = after
    LAST: gl.constexpr = (STEPS - 1) // DEEP * DEEP
    for at in gl.static_range(STEPS - LAST):
        sums = multiply(ring[at], ring[at][2], x_groups, LAST + at, sums, SLOTS, BM)
    m = first_row + gl.arange(0, BM, gl.SliceLayout(1, SUMS))
    return sums * SMALL + gl.expand_dims(gl.load(bias + expert * R + m, mask=m < R, other=0.0).to(gl.float32), 1)


@gluon.jit
def columns_of(lists, expert, slots, done, count, SLOTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The expert's slots in the columns of a product, and which of them are real."""
    n = gl.arange(0, COLUMNS, LAYOUT)
    real = (n < SLOTS) & (done + n < count)
    return gl.load(lists + expert * slots + done + n, mask=real, other=0), real


@gluon.jit(do_not_specialize=["slots"])
def gate_up(x, lists, counts, words, scales, bias, inner, slots, limit, TOP_K: gl.constexpr, R: gl.constexpr,
            K: gl.constexpr, EXPERTS: gl.constexpr, BE: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr,
            DEEP: gl.constexpr):
    """`few.gate_up` for SLOTS of an expert at once."""
    gdc_wait()
    gdc_launch_dependents()
    first_row = gl.program_id(0) * BM
    expert, count = chosen_expert(counts, EXPERTS, BE)
    x_chunks = gl.allocate_shared_memory(
        gl.bfloat16, [chunks_of(K), CHUNK, SLOTS, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    for done in range(0, count, SLOTS):
        sums = products(x, lists, expert, slots, done, count, words, scales, bias, first_row, x_chunks, False, TOP_K,
                        R, K, SLOTS, BM, DEEP)
        gate, up = gl.split(sums.reshape([BM // 16, 2, 8, COLUMNS]).permute([0, 2, 3, 1]))
        gate = gl.minimum(gate.reshape([BM // 2, COLUMNS]), limit)
        up = gl.minimum(gl.maximum(up.reshape([BM // 2, COLUMNS]), -limit), limit)
        out = (up + 1) * gate / (1 + gl.exp(gate * -ALPHA))
        row = gl.expand_dims(first_row // 2 + gl.arange(0, BM // 2, gl.SliceLayout(1, out.type.layout)), 1)
        slot, real = columns_of(lists, expert, slots, done, count, SLOTS, gl.SliceLayout(0, out.type.layout))
        to = inner + gl.expand_dims(slot * (R // 2), 0) + row
        gl.store(to, out.to(inner.dtype.element_ty), mask=gl.expand_dims(real, 0) & (row < R // 2))


@gluon.jit(do_not_specialize=["slots"])
def down(inner, lists, counts, topk_weights, words, scales, bias, shares, slots, R: gl.constexpr, K: gl.constexpr,
         EXPERTS: gl.constexpr, BE: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, DEEP: gl.constexpr):
    """`few.down` for SLOTS of an expert at once. Lists may be read before the wait for the reason given there."""
    first_row = gl.program_id(0) * BM
    expert, count = chosen_expert(counts, EXPERTS, BE)
    x_chunks = gl.allocate_shared_memory(
        gl.bfloat16, [chunks_of(K), CHUNK, SLOTS, 32], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    for done in range(0, count, SLOTS):
        sums = products(inner, lists, expert, slots, done, count, words, scales, bias, first_row, x_chunks, True, 1, R,
                        K, SLOTS, BM, DEEP)
        slot, real = columns_of(lists, expert, slots, done, count, SLOTS, gl.SliceLayout(0, sums.type.layout))
        sums *= gl.expand_dims(gl.load(topk_weights + slot, mask=real, other=0.0), 0)
        row = gl.expand_dims(first_row + gl.arange(0, BM, gl.SliceLayout(1, sums.type.layout)), 1)
        gl.store(shares + gl.expand_dims(slot * R, 0) + row, sums, mask=gl.expand_dims(real, 0) & (row < R))
    if count == 0:
        gdc_wait()
        gdc_launch_dependents()


# fmt: on


def shares_of(call: Call, lists: torch.Tensor, counts: torch.Tensor, shape: FewTiles) -> torch.Tensor:
    """lists, counts as `few.assign` leaves them -> the slots' weighted results [slots, hidden size] float32; results of
    slots without an expert here are undefined."""
    experts, slots = call.experts.num_experts, call.slots
    first, second = call.experts.gate_up, call.experts.down
    inner = call.hidden.new_empty(slots, second.inputs)
    shares = torch.empty(slots, second.rows, dtype=torch.float32, device=call.hidden.device)
    programs = min(slots, experts)
    common = {
        "EXPERTS": experts,
        "BE": max(1 << (experts - 1).bit_length(), 32),
        "SLOTS": shape.slots,
        "BM": shape.rows,
        "DEEP": shape.deep,
        "num_warps": shape.warps,
        "maxnreg": shape.registers,
        "launch_pdl": True,
    }
    words = [matrix.words.view(torch.int32) for matrix in (first, second)]
    gate_up[(-(-first.rows // shape.rows), programs)](
        *(call.hidden, lists, counts, words[0], first.scales, first.bias, inner, slots, call.swiglu_limit),
        TOP_K=call.top_k,
        R=first.rows,
        K=first.inputs,
        **common,
    )
    down[(-(-second.rows // shape.rows), programs)](
        *(inner, lists, counts, call.topk_weights, words[1], second.scales, second.bias, shares, slots),
        R=second.rows,
        K=second.inputs,
        **common,
    )
    return shares
