"""Causal attention of prompt rows for Hopper, in Gluon: copies, products and softmax in separate warps.

The same as `prefill.py`, with the schedule written out, after FlashAttention-3 (Shah et al. 2024). One program a
multiprocessor takes tile after tile. In it one warp fetches keys and values through the tensor memory accelerator,
and groups of four warps own 64 rows each: a group starts the scores of the next keys, then the sum over these, and
computes the softmax of one while the tensor cores work on the other. The groups start their products in turns, so
that while one computes its softmax another's products run. The sink is the online softmax's initial state.
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

from npu_gptoss.kernels.gluon_names import barrier, barriers, load_tile

ROWS = gl.constexpr(64)  # of one group of warps: what one matrix instruction takes
CONSUMERS = gl.constexpr(3)  # groups of warps that compute; a tile has CONSUMERS * ROWS // GROUP positions
REGISTERS = gl.constexpr(160)  # of a thread that computes; with the producers' 24 they fill the register file
LOG2_E = gl.constexpr(1.4426950408889634)

# fmt: off
# (lists of twenty arguments are shorter to read filled than one a line)


@gluon.jit
def nth_unit(count, units):
    """There and back over the programs, as units get smaller: each gets about the same work."""
    programs = gl.num_programs(0)
    program = gl.program_id(0)
    return count * programs + gl.where(count % 2 == 0, program, programs - 1 - program)


@gluon.jit
def unit_fields(
    unit, requests, tiles, total, KV_HEADS: gl.constexpr, BEFORE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Returns for a tile and a key head: head, first row of the prompt, its rows, the tile's first row in it, the
    position of the prompt's row 0 counted from the first key read, that key's place, key tiles, masked ones at the end.
    """
    entry = tiles + unit // KV_HEADS * 2
    head = unit % KV_HEADS
    fields = requests + gl.load(entry) * 6
    first_row = gl.load(fields + 1)
    rows = gl.load(fields + 2)
    position = gl.load(fields + 3) - gl.load(fields + 4)
    place = gl.load(fields + 5) + head * total
    begin = gl.load(entry + 1) * BLOCK_Q
    lowest = position + begin
    steps = gl.cdiv(gl.minimum(lowest + BLOCK_Q, position + rows), BLOCK_N)
    if BEFORE < 0:
        masked = steps - (lowest + 1) // BLOCK_N
    else:
        start = gl.maximum(lowest - BEFORE, 0) // BLOCK_N
        steps -= start
        masked = steps
        place += start * BLOCK_N
        position -= start * BLOCK_N
    return head, first_row, rows, begin, position, place, steps, masked


@gluon.jit
def fetch(
    keys, values, requests, tiles, units, total, key_tiles, value_tiles, key_full, value_full, key_empty, value_empty,
    KV_HEADS: gl.constexpr, DIM: gl.constexpr, BEFORE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The producer: key tiles from the last to the first."""
    done = 0
    for count in range(gl.cdiv(units, gl.num_programs(0))):
        unit = nth_unit(count, units)
        if unit < units:
            _, _, _, _, _, place, steps, _ = unit_fields(
                unit, requests, tiles, total, KV_HEADS, BEFORE, BLOCK_Q, BLOCK_N
            )
            for step in range(steps):
                stage = (done + step) % STAGES
                phase = (done + step) // STAGES & 1
                row = place + (steps - 1 - step) * BLOCK_N
                mbarrier.wait(key_empty.index(stage), phase ^ 1)
                mbarrier.expect(key_full.index(stage), BLOCK_N * DIM * 2)
                load_tile(keys, [row, 0], key_full.index(stage), key_tiles.index(stage))
                mbarrier.wait(value_empty.index(stage), phase ^ 1)
                mbarrier.expect(value_full.index(stage), BLOCK_N * DIM * 2)
                load_tile(values, [row, 0], value_full.index(stage), value_tiles.index(stage))
            done += steps


@gluon.jit
def hidden(scores, at, row_at, BEFORE: gl.constexpr, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr):
    """-inf where a row does not see a key."""
    key_at = (at + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)))[None, :]
    seen = key_at <= row_at[:, None]
    if BEFORE >= 0:
        seen = seen & (key_at >= row_at[:, None] - BEFORE)
    return gl.where(seen, scores, float("-inf"))


@gluon.jit
def softmax(scores, scale, largest, weight):
    """Returns base-2 weights, the factor for earlier sums, the largest score and the sum of weights."""
    new = gl.maximum(largest, gl.max(scores, 1) * scale)
    weights = gl.exp2(scores * scale - new[:, None])
    shrink = gl.exp2(largest - new)
    return weights, shrink, new, weight * shrink + gl.sum(weights, 1)


@gluon.jit
def take_turn(turns, done, NUMBER: gl.constexpr):
    mbarrier.wait(turns.index(NUMBER), (done & 1) ^ (1 if NUMBER == 0 else 0))


@gluon.jit
def give_turn(turns, NUMBER: gl.constexpr):
    mbarrier.arrive(turns.index((NUMBER + 1) % CONSUMERS), count=1)


@gluon.jit
def compute(
    query, sinks, out, requests, tiles, units, total, scale, query_row, query_head, out_row, out_head, q_tile,
    key_tiles, value_tiles, key_full, value_full, key_empty, value_empty, turns, HEADS: gl.constexpr,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BEFORE: gl.constexpr, BLOCK_Q: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, NUMBER: gl.constexpr,
):
    """A consumer: 64 rows of each tile, ROWS // GROUP positions of all query heads of one key head."""
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DIM, 16])  # noqa: E741
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    row_s = gl.arange(0, ROWS, gl.SliceLayout(1, S))
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, S)
    done = 0
    for count in range(gl.cdiv(units, gl.num_programs(0))):
        unit = nth_unit(count, units)
        if unit < units:
            head, first_row, rows, begin, position, _, steps, masked = unit_fields(
                unit, requests, tiles, total, KV_HEADS, BEFORE, BLOCK_Q, BLOCK_N
            )
            begin += NUMBER * (ROWS // GROUP)
            within = begin + at // GROUP
            real = (within < rows) & (at % GROUP < HEADS)
            row = (first_row + within).to(gl.int64)
            q_head = head * HEADS + at % GROUP
            source = (row * query_row + q_head * query_head)[:, None] + dim
            q_tile.store(gl.load(query + source, mask=real[:, None], other=0.0))
            fence_async_shared()
            barrier()

            row_at = position + begin + row_s // GROUP
            sink = gl.load(sinks + head * HEADS + row_s % GROUP, mask=row_s % GROUP < HEADS, other=0.0)
            largest = sink.to(gl.float32) * LOG2_E
            weight = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, S))
            result = gl.zeros([ROWS, DIM], gl.float32, O)

            stage = done % STAGES
            mbarrier.wait(key_full.index(stage), done // STAGES & 1)
            take_turn(turns, done, NUMBER)
            scores = warpgroup_mma(q_tile, key_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
            give_turn(turns, NUMBER)
            scores = warpgroup_mma_wait(0, deps=[scores])
            barrier()
            mbarrier.arrive(key_empty.index(stage), count=1)
            scores = hidden(scores, (steps - 1) * BLOCK_N, row_at, BEFORE, BLOCK_N, S)
            weights, shrink, largest, weight = softmax(scores, scale, largest, weight)
            weights = gl.convert_layout(weights.to(gl.bfloat16), P)

            for step in range(1, steps):
                now = done + step
                stage = now % STAGES
                last = (now - 1) % STAGES
                mbarrier.wait(key_full.index(stage), now // STAGES & 1)
                mbarrier.wait(value_full.index(last), (now - 1) // STAGES & 1)
                take_turn(turns, now, NUMBER)
                scores = warpgroup_mma(
                    q_tile, key_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                result = warpgroup_mma(weights, value_tiles.index(last), result, is_async=True)
                give_turn(turns, NUMBER)
                scores = warpgroup_mma_wait(1, deps=[scores])
                barrier()
                mbarrier.arrive(key_empty.index(stage), count=1)
                if step < masked:
                    scores = hidden(scores, (steps - 1 - step) * BLOCK_N, row_at, BEFORE, BLOCK_N, S)
                next_weights, shrink, largest, weight = softmax(scores, scale, largest, weight)
                result = warpgroup_mma_wait(0, deps=[result])
                barrier()
                mbarrier.arrive(value_empty.index(last), count=1)
                result = result * gl.convert_layout(shrink, gl.SliceLayout(1, O))[:, None]
                weights = gl.convert_layout(next_weights.to(gl.bfloat16), P)

            done += steps
            last = (done - 1) % STAGES
            mbarrier.wait(value_full.index(last), (done - 1) // STAGES & 1)
            result = warpgroup_mma(weights, value_tiles.index(last), result, is_async=True)
            result = warpgroup_mma_wait(0, deps=[result])
            barrier()
            mbarrier.arrive(value_empty.index(last), count=1)
            result = result * gl.convert_layout(1.0 / weight, gl.SliceLayout(1, O))[:, None]
            # through the memory of the queries, so that whole rows are written
            q_tile.store(result.to(gl.bfloat16))
            barrier()
            target = (row * out_row + q_head * out_head)[:, None] + dim
            gl.store(out + target, q_tile.load(WIDE).to(out.dtype.element_ty), mask=real[:, None])
            barrier()


@gluon.jit(do_not_specialize=["units"])
def prefill_kernel(
    query,  # [rows, heads, DIM], strides query_row, query_head
    keys,  # descriptor of [KV_HEADS * total, DIM], tiles of BLOCK_N keys
    values,
    sinks,  # [heads]
    out,  # [rows, heads, DIM], strides out_row, out_head
    requests,  # [prompts, 6], see plan.Prompts
    tiles,  # [tiles, 2]
    units,  # tiles * KV_HEADS
    total,
    scale,  # of the scores, times log2 e
    query_row, query_head, out_row, out_head,
    HEADS: gl.constexpr,  # query heads of a key head
    GROUP: gl.constexpr,  # the power of two that holds them
    KV_HEADS: gl.constexpr,
    DIM: gl.constexpr,
    BEFORE: gl.constexpr,  # keys seen before a row's own; negative: all
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    BLOCK_Q: gl.constexpr = CONSUMERS * ROWS // GROUP
    q_tiles = gl.allocate_shared_memory(
        gl.bfloat16, [CONSUMERS, ROWS, DIM], gl.NVMMASharedLayout.get_default_for([ROWS, DIM], gl.bfloat16)
    )
    key_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, DIM], keys.layout)
    value_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, DIM], values.layout)
    key_full = barriers(STAGES, 1)
    value_full = barriers(STAGES, 1)
    key_empty = barriers(STAGES, CONSUMERS)
    value_empty = barriers(STAGES, CONSUMERS)
    turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    barrier()

    # the arguments stand here each time, because a tuple with a name would turn its constants into values
    gl.warp_specialize(
        [
            (compute, (
                query, sinks, out, requests, tiles, units, total, scale, query_row, query_head, out_row, out_head,
                q_tiles.index(0), key_tiles, value_tiles, key_full, value_full, key_empty, value_empty, turns,
                HEADS, GROUP, KV_HEADS, DIM, BEFORE, BLOCK_Q, BLOCK_N, STAGES, 0,
            )),
            (compute, (
                query, sinks, out, requests, tiles, units, total, scale, query_row, query_head, out_row, out_head,
                q_tiles.index(1), key_tiles, value_tiles, key_full, value_full, key_empty, value_empty, turns,
                HEADS, GROUP, KV_HEADS, DIM, BEFORE, BLOCK_Q, BLOCK_N, STAGES, 1,
            )),
            (compute, (
                query, sinks, out, requests, tiles, units, total, scale, query_row, query_head, out_row, out_head,
                q_tiles.index(2), key_tiles, value_tiles, key_full, value_full, key_empty, value_empty, turns,
                HEADS, GROUP, KV_HEADS, DIM, BEFORE, BLOCK_Q, BLOCK_N, STAGES, 2,
            )),
            (fetch, (
                keys, values, requests, tiles, units, total, key_tiles, value_tiles, key_full, value_full, key_empty,
                value_empty, KV_HEADS, DIM, BEFORE, BLOCK_Q, BLOCK_N, STAGES,
            )),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


# fmt: on
