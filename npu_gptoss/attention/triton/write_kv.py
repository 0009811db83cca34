"""The cache write: a program a token copies its key row and its value row to the token's slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from npu_gptoss.attention.operations import head_stride
from npu_gptoss.kernels.triton_launch import launch, let_next_start, wait_for_inputs


@triton.jit
def write_kernel(
    key,  # [tokens, WIDTH], rows `key_stride` apart
    value,
    key_cache,  # [slots, WIDTH], heads of DIM elements STRIDE apart
    value_cache,
    slots,  # [tokens] int32 or int64; negative: not written
    key_stride, value_stride,
    WIDTH: tl.constexpr, DIM: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_inputs(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot >= 0:
        column = tl.arange(0, BLOCK)
        inside = column < WIDTH
        target = slot * (WIDTH // DIM * STRIDE) + column // DIM * STRIDE + column % DIM
        row = tl.load(key + token * key_stride + column, mask=inside)
        tl.store(key_cache + target, row.to(key_cache.dtype.element_ty), mask=inside)
        row = tl.load(value + token * value_stride + column, mask=inside)
        tl.store(value_cache + target, row.to(value_cache.dtype.element_ty), mask=inside)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """The kernel of attention.write_kv."""
    tokens, kv_heads, head_dim = key.shape
    width = kv_heads * head_dim
    key, value = (x if x.stride()[1:] == (head_dim, 1) else x.contiguous() for x in (key, value))
    launch(
        write_kernel,
        (tokens,),
        (key, value, key_cache, value_cache, slot_mapping, key.stride(0), value.stride(0)),
        warps=1,
        WIDTH=width,
        DIM=head_dim,
        STRIDE=head_stride(key_cache, value_cache),
        BLOCK=triton.next_power_of_2(width),
    )
