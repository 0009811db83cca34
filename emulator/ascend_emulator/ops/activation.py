"""Gated activations: plain swiglu, clipped swiglu (from CANN 8.5), and the activation between two int8 matmuls."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, name_of, poisoned, shape
from ascend_emulator.rules import Call, Layer, NotEmulatedError

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
STATIC, DYNAMIC = 0, 1
PLAIN, CLIPPED = 0, 1
WIDEST_QUANTISED = 10496


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


@kernel(
    "npu::npu_dequant_swiglu_quant(Tensor x, *, Tensor? weight_scale=None, Tensor? activation_scale=None, "
    "Tensor? bias=None, Tensor? quant_scale=None, Tensor? quant_offset=None, Tensor? group_index=None, "
    "bool activate_left=False, int quant_mode=0, int swiglu_mode=0, float clamp_limit=7.0, float glu_alpha=1.702, "
    "float glu_bias=1.0) -> (Tensor, Tensor)"
)
def dequant_swiglu_quant(
    x: torch.Tensor,
    *,
    weight_scale: torch.Tensor | None = None,
    activation_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    quant_scale: torch.Tensor | None = None,
    quant_offset: torch.Tensor | None = None,
    group_index: torch.Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float = 7.0,
    glu_alpha: float = 1.702,
    glu_bias: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, 2H] -> int8 [tokens, H], float32 scales [tokens]. swiglu_mode 1: clipped, even and odd entries."""
    call = Call.of("npu_dequant_swiglu_quant", "aclnnDequantSwigluQuantV2")
    call.require(
        x.dtype in (torch.int32, torch.bfloat16, torch.float16) or call.context.stands_for(x.dtype, torch.bfloat16),
        69,
        f"x should be int32, bfloat16 or float16, got {name_of(x.dtype)}",
        Layer.PARAMETER,
    )
    call.require(
        x.dtype != torch.int32 or (weight_scale is not None and activation_scale is not None),
        69,
        f"int32 x needs weight_scale and activation_scale, got {shape(weight_scale)} and {shape(activation_scale)}",
        Layer.PARAMETER,
    )
    call.require(
        group_index is None or quant_mode == DYNAMIC,
        69,
        f"group_index {shape(group_index)} needs quant_mode 1 (dynamic), got {quant_mode}",
        Layer.PARAMETER,
    )
    call.require(x.size(-1) % 2 == 0, 69, f"the last size of x should be even, got {shape(x)}", Layer.PARAMETER)
    hidden = x.size(-1) // 2
    call.require(
        hidden % 64 == 0 and hidden <= WIDEST_QUANTISED,
        69,
        f"H should be a multiple of 64 and at most {WIDEST_QUANTISED}, got {hidden} in {shape(x)}",
    )
    out, scales = poisoned(_halved(x, -1), x, torch.int8), poisoned(x.shape[:-1], x, torch.float32)
    if not call.context.execute:
        return out, scales
    if group_index is not None and group_index.numel() > 1:
        raise NotEmulatedError("npu_dequant_swiglu_quant: the emulator has one group only")
    values = x.float()
    if weight_scale is not None:
        values = values * weight_scale.float().reshape(1, -1)
    if activation_scale is not None:
        values = values * activation_scale.float().reshape(-1, 1)
    if bias is not None:
        values = values + bias.float().reshape(1, -1)
    if swiglu_mode == CLIPPED:
        result = clipped(values[..., ::2], values[..., 1::2], glu_alpha, clamp_limit, glu_bias)
    else:
        left, right = values.chunk(2, -1)
        acted, other = (left, right) if activate_left else (right, left)
        result = torch.nn.functional.silu(acted) * other
    if quant_mode == STATIC:
        result = result / (quant_scale.float() if quant_scale is not None else 1.0)
        result = result + (quant_offset.float() if quant_offset is not None else 0.0)
        out.copy_(result.round().clamp(-128, 127))
        return out, scales
    if quant_scale is not None:
        result = result * quant_scale.float().reshape(1, -1)
    rows = x.size(0) if group_index is None else min(int(group_index.sum()), x.size(0))
    row_scale = (result.abs().amax(-1) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    out[:rows] = (result / row_scale[..., None])[:rows].round().to(torch.int8)
    scales[:rows] = row_scale[:rows]
    return out, scales
