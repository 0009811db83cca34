"""The largest logit of each row, if all are finite, in two launches that fill the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def partial_kernel(
    logits,  # [rows, VOCAB]
    values,  # [rows, parts] fp32
    ids,  # [rows, parts] int32; -1: not all are finite
    parts,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * VOCAB + at, mask=at < VOCAB, other=float("-inf")).to(tl.float32)
    finite = (tl.abs(value) < float("inf")) | (at >= VOCAB)  # NaN compares false
    clean = tl.where(finite, value, float("-inf"))
    largest = tl.max(clean, 0)
    winner = tl.min(tl.where(clean == largest, at, VOCAB), 0)  # the first of equals
    tl.store(values + row * parts + part, largest)
    tl.store(ids + row * parts + part, tl.where(tl.min(finite.to(tl.int32), 0) == 1, winner, -1))


@triton.jit
def final_kernel(
    values,
    ids,
    out,  # [rows] int64, `stride` apart
    parts,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < parts
    value = tl.load(values + row * parts + at, mask=inside, other=float("-inf"))
    index = tl.load(ids + row * parts + at, mask=inside, other=VOCAB)
    winner = tl.min(tl.where((value == tl.max(value, 0)) & inside, index, VOCAB), 0)
    tl.store(out + row * stride, tl.where(tl.min(index, 0) < 0, -1, winner).to(tl.int64))
