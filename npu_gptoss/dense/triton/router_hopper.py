"""Router logits, top-k and softmax of normed rows, in Gluon for Hopper: for so many rows that weights count.

A program takes eight rows and 32 experts, each warp a part of the inputs. All of the program's weights are in registers
before the kernel waits for its predecessor, the norm. Where there are more experts, the last program of eight rows to
arrive takes the top-k, and leaves the counter at zero. A logit of sixteen bits and its expert's number are one integer
there, of which the first of equals is the largest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from npu_gptoss.kernels.gluon_names import barrier

ROWS = gl.constexpr(8)  # of a program, as many as the instruction has columns
SHARE = gl.constexpr(32)  # experts of a program
NOTHING = gl.constexpr(-(2**31))  # below the key of any logit

# fmt: off
# (lists of many arguments are shorter to read filled than one a line)


@gluon.jit
def weights_of(weight, first_expert, FIRST: gl.constexpr, INPUTS: gl.constexpr, HIDDEN: gl.constexpr,
               OPERAND: gl.constexpr):
    """[warps, SHARE, INPUTS / warps]: of the experts the inputs from FIRST on, zeros behind the last."""
    EACH: gl.constexpr = INPUTS // gl.num_warps()
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    expert = gl.arange(0, SHARE, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :, None]
    at = FIRST + warp * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND)))[None, None, :]
    return gl.load(weight + (first_expert + expert) * HIDDEN + at, mask=at < HIDDEN, other=0.0)


@gluon.jit
def rows_of(x, tokens, FIRST: gl.constexpr, INPUTS: gl.constexpr, HIDDEN: gl.constexpr, OPERAND: gl.constexpr):
    """[warps, INPUTS / warps, ROWS]: of the rows at x the same inputs; the last of `tokens` stands for those behind."""
    EACH: gl.constexpr = INPUTS // gl.num_warps()
    warp = gl.arange(0, gl.num_warps(), gl.SliceLayout(1, gl.SliceLayout(2, OPERAND)))[:, None, None]
    row = gl.minimum(gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(1, OPERAND))), tokens - 1)[None, None, :]
    at = FIRST + warp * EACH + gl.arange(0, EACH, gl.SliceLayout(0, gl.SliceLayout(2, OPERAND)))[None, :, None]
    return gl.load(x + row * HIDDEN + at, mask=at < HIDDEN, other=0.0)


@gluon.jit(do_not_specialize=["tokens"])
def router_kernel(
    normed,  # [tokens, HIDDEN]
    weight,  # [EXPERTS, HIDDEN]
    bias,  # [EXPERTS]
    live,  # [tokens], if HAS_LIVE: 0 marks a padding row, whose ids become -1 and whose weights 0
    topk_weights,  # [tokens, TOP_K] fp32
    topk_ids,  # [tokens, TOP_K] int32
    sums,  # [tokens, EXPERTS] fp32, scratch, if EXPERTS > SHARE
    arrived,  # [tokens / ROWS] int32, zeros
    tokens,
    HIDDEN: gl.constexpr, EXPERTS: gl.constexpr, TOP_K: gl.constexpr, BLOCK_A: gl.constexpr, BLOCK_B: gl.constexpr,
    BLOCK_K: gl.constexpr, HAS_LIVE: gl.constexpr, PDL: gl.constexpr,
):
    WARPS: gl.constexpr = gl.num_warps()
    PROGRAMS: gl.constexpr = EXPERTS // SHARE
    SUMS: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=SUMS, k_width=8)
    RIGHT: gl.constexpr = gl.DotOperandLayout(operand_index=1, parent=SUMS, k_width=8)
    LOGITS: gl.constexpr = gl.BlockedLayout([1, EXPERTS // 32], [1, 32], [8, WARPS // 8], [1, 0])
    part = gl.program_id(0)
    group = gl.program_id(1)
    weight_a = weights_of(weight, part * SHARE, 0, BLOCK_A, HIDDEN, LEFT)
    weight_b = weights_of(weight, part * SHARE, BLOCK_A, BLOCK_B, HIDDEN, LEFT)
    at = gl.arange(0, EXPERTS, gl.SliceLayout(0, LOGITS))[None, :]
    shift = gl.load(bias + at)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    x = normed + (group * ROWS).to(gl.int64) * HIDDEN
    x_a = rows_of(x, tokens - group * ROWS, 0, BLOCK_A, HIDDEN, RIGHT)
    x_b = rows_of(x, tokens - group * ROWS, BLOCK_A, BLOCK_B, HIDDEN, RIGHT)
    each = gl.zeros([WARPS, SHARE, ROWS], gl.float32, SUMS)
    each = mma_v2(weight_a, x_a, each)
    each = mma_v2(weight_b, x_b, each)
    value = gl.sum(each, 0)
    last = gl.to_tensor(True)
    if PROGRAMS > 1:
        column = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
        expert = part * SHARE + gl.arange(0, SHARE, gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))
        gl.store(sums + column * EXPERTS + expert[:, None], value, mask=column < tokens)
        barrier()  # all of this program's sums are on their way before its arrival is counted
        last = gl.atomic_add(arrived + group, 1, sem="acq_rel") == PROGRAMS - 1
    if last:
        line = group * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, LOGITS))[:, None]
        there = line < tokens
        if PROGRAMS > 1:
            gl.store(arrived + group, 0)
            left = gl.load(sums + line * EXPERTS + at, mask=there, other=0.0, cache_modifier=".cg")
        else:
            left = gl.convert_layout(value.permute((1, 0)), LOGITS)
        left = (left + shift.to(gl.float32)).to(gl.bfloat16).to(gl.float32)  # router logits are rounded, ties included
        # What is left of a logit are its upper 16 bits; of a negative one they are turned over: integers in its order.
        bits = (left + 0.0).to(gl.int32, bitcast=True) >> 16  # -0 is 0
        bits = gl.where(bits < 0, bits ^ 0x7FFF, bits)
        key = bits * 65536 + (65535 - at)
        slot = gl.arange(0, BLOCK_K, gl.SliceLayout(0, LOGITS))[None, :]
        best = gl.full([ROWS, BLOCK_K], NOTHING, gl.int32, LOGITS)
        for k in gl.static_range(TOP_K):
            largest = gl.max(key, 1)[:, None]
            best = gl.where(slot == k, largest, best)
            key = gl.where(key == largest, NOTHING, key)
        ids = 65535 - (best & 65535)
        bits = best >> 16
        bits = gl.where(bits < 0, bits ^ 0x7FFF, bits)
        chosen = gl.where(slot < TOP_K, (bits * 65536).to(gl.float32, bitcast=True), float("-inf"))
        share = gl.exp(chosen - gl.max(chosen, 1)[:, None])
        share = share / gl.sum(share, 1)[:, None]
        if HAS_LIVE:
            alive = gl.load(live + line, mask=there, other=0) > 0
            share = gl.where(alive, share, 0.0)
            ids = gl.where(alive, ids, -1)
        target = line * TOP_K + slot
        gl.store(topk_weights + target, share, mask=there & (slot < TOP_K))
        gl.store(topk_ids + target, ids, mask=there & (slot < TOP_K))


# fmt: on
