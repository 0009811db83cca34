"""The largest logit of each row and whether all are finite, in two launches that fill the chip."""

from __future__ import annotations

import triton
import triton.language as tl

from npu_gptoss.kernels.triton_launch import let_next_start, wait_for_inputs


@triton.jit
def partial_kernel(
    logits,  # [rows, VOCAB] or fp32
    values,  # [rows, parts] fp32
    ids,  # [rows, parts] int32
    bad,  # [rows, parts] int32
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
    tl.store(values + row * parts + part, largest)
    tl.store(ids + row * parts + part, tl.min(tl.where(clean == largest, at, VOCAB), 0))
    tl.store(bad + row * parts + part, tl.max(tl.where(finite, 0, 1), 0))


@triton.jit
def final_kernel(
    values,
    ids,
    bad,
    token_ids,  # [rows] int64
    finite,  # [rows] bool, as bytes
    parts,
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
    largest = tl.max(value, 0)
    winner = tl.min(tl.where((value == largest) & inside, index, VOCAB), 0)  # the first of equals
    tl.store(token_ids + row, tl.minimum(winner, VOCAB - 1).to(tl.int64))
    damaged = tl.max(tl.load(bad + row * parts + at, mask=inside, other=0), 0)
    tl.store(finite + row, (1 - damaged).to(tl.uint8))
