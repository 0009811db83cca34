"""Gated activations: plain swiglu, and clipped swiglu (from CANN 8.5)."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def _halved(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    size = list(tensor.shape)
    size[dim] //= 2
    return tuple(size)


def clipped(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float, bias: float) -> torch.Tensor:
    """(clamp(up, -limit, limit) + bias) * g * sigmoid(alpha * g) with g = min(gate, limit), float32."""
    gate, up = gate.float().clamp(max=limit), up.float().clamp(-limit, limit)
    return (up + bias) * gate * torch.sigmoid(alpha * gate)


@kernel("npu::npu_swiglu(Tensor input, int dim=-1) -> Tensor")
def swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along dim; no clamp, no alpha."""
    call = Call.of("npu_swiglu", "aclnnSwiGlu")
    call.require(
        input.dtype in FLOATS,
        None,
        f"x should be float16, bfloat16 or float32, got {name_of(input.dtype)}",
        Layer.PARAMETER,
    )
    call.require(
        input.size(dim) % 2 == 0, 68, f"the size along dim {dim} should be even, got {shape(input)}", Layer.PARAMETER
    )
    out = poisoned(_halved(input, dim), input)
    if call.context.execute:
        left, right = input.float().chunk(2, dim)
        out.copy_(torch.nn.functional.silu(left) * right)
    return out


@kernel(
    "npu::npu_clipped_swiglu(Tensor x, *, Tensor? group_index=None, int dim=-1, float alpha=1.702, float limit=7.0, "
    "float bias=1.0, bool interleaved=True) -> Tensor"
)
def clipped_swiglu(
    x: torch.Tensor,
    *,
    group_index: torch.Tensor | None = None,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
) -> torch.Tensor:
    """interleaved: gate and up are the even and odd entries along dim, else halves. Rows past groups are unwritten."""
    call = Call.of("npu_clipped_swiglu", "aclnnClippedSwiglu")
    call.reject(66, "module 'torch_npu' has no attribute 'npu_clipped_swiglu' (op-plugin 7.2.0)", Layer.BINDING)
    call.require(x.dim() > 1, 67, f"x should have two dimensions or more, got {shape(x)}", Layer.PARAMETER)
    call.require(
        x.dtype in FLOATS, 67, f"x should be float16, bfloat16 or float32, got {name_of(x.dtype)}", Layer.PARAMETER
    )
    call.require(
        x.is_contiguous(),
        67,
        f"x should be contiguous, got {shape(x)} with strides {list(x.stride())}",
        Layer.PARAMETER,
    )
    call.require(x.size(dim) % 2 == 0, 67, f"the size along dim {dim} should be even, got {shape(x)}", Layer.PARAMETER)
    if group_index is not None:
        call.require(
            group_index.dtype == torch.int64 and group_index.dim() == 1,
            67,
            f"group_index should be int64 with one dimension, got {name_of(group_index.dtype)} {shape(group_index)}",
            Layer.PARAMETER,
        )
    out = poisoned(_halved(x, dim), x)
    if not call.context.execute:
        return out
    if interleaved:
        pairs = x.unflatten(dim, (-1, 2)) if dim >= 0 else x.movedim(dim, -1).unflatten(-1, (-1, 2))
        at = dim + 1 if dim >= 0 else -1
        gate, up = pairs.select(at, 0), pairs.select(at, 1)
        if dim < 0:
            gate, up = gate.movedim(-1, dim), up.movedim(-1, dim)
    else:
        gate, up = x.chunk(2, dim)
    result = clipped(gate, up, alpha, limit, bias)
    rows = x.size(0) if group_index is None else min(int(group_index.sum()), x.size(0))
    out[:rows] = result[:rows].to(out.dtype)
    return out
