"""Small operators without a rule of their own that vllm-ascend 0.11 calls around attention and experts."""

from __future__ import annotations

import torch
from ascend_emulator.ops.table import kernel, poisoned, shape
from ascend_emulator.rules import Call, Layer


@kernel("npu::npu_dtype_cast(Tensor input, ScalarType dtype) -> Tensor")
def dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return input.to(dtype)


@kernel("npu::_npu_dtype_cast(Tensor input, ScalarType dtype) -> Tensor")
def inner_dtype_cast(input: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return input.to(dtype, copy=True)


@kernel("aten::histc(Tensor self, int bins=100, Scalar min=0, Scalar max=0) -> Tensor")
def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0) -> torch.Tensor:
    """Counts in the input's type: the device counts integers too, which torch refuses on the CPU."""
    call = Call.of("histc", "aclnnHistc")
    out = poisoned((bins,), self)
    if call.context.execute:
        out.copy_(torch.histc(self.double(), bins, min, max))
    return out


@kernel("npu::npu_prefetch(Tensor input, Tensor? dependency, int max_size, int offset=0) -> ()")
def prefetch(input: torch.Tensor, dependency: torch.Tensor | None, max_size: int, offset: int = 0) -> None:
    """Computes nothing: a hint to the cache."""
    call = Call.of("npu_prefetch", "aclrtCmoAsync")
    call.require(
        max_size > 0 and offset >= 0, None, f"max_size {max_size} and offset {offset} are wrong", Layer.BINDING
    )


@kernel("npu::npu_top_k_top_p(Tensor logits, Tensor? p=None, Tensor? k=None) -> Tensor")
def top_k_top_p(logits: torch.Tensor, p: torch.Tensor | None = None, k: torch.Tensor | None = None) -> torch.Tensor:
    """logits [B, V] with -inf outside the k largest, then outside the smallest set with probability p."""
    call = Call.of("npu_top_k_top_p", "aclnnApplyTopKTopP")
    for name, tensor, dtypes in (("p", p, (logits.dtype,)), ("k", k, (torch.int32,))):
        call.require(
            tensor is None or (tensor.dtype in dtypes and list(tensor.shape) == [logits.size(0)]),
            None,
            f"{name} should be {dtypes[0]} [{logits.size(0)}], got {None if tensor is None else tensor.dtype} "
            f"{shape(tensor)}",
            Layer.PARAMETER,
        )
    out = poisoned(logits.shape, logits)
    if not call.context.execute:
        return out
    values, order = logits.float().sort(-1)
    columns = logits.size(-1)
    if k is not None:
        least = values.gather(-1, (columns - k.long().clamp(1, columns))[:, None])
        values = values.masked_fill(values < least, float("-inf"))
    if p is not None:
        reached = values.softmax(-1).cumsum(-1)
        drop = reached <= 1 - p.float()[:, None]
        drop[:, -1] = False
        values = values.masked_fill(drop, float("-inf"))
    out.copy_(torch.empty_like(values).scatter_(-1, order, values))
    return out


@kernel("atb::_npu_matmul_add_fp32(Tensor x, Tensor weight, Tensor(a!) C) -> ()")
def matmul_add_fp32(x: torch.Tensor, weight: torch.Tensor, C: torch.Tensor) -> None:
    """C [m, n] float32 += x [k, m] transposed times weight [k, n]. vllm-ascend initialises ATB with it."""
    call = Call.of("_npu_matmul_add_fp32", "LinearParams")
    call.require(
        x.dtype == weight.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and C.dtype == torch.float32
        and x.dim() == weight.dim() == 2
        and x.size(0) == weight.size(0)
        and list(C.shape) == [x.size(1), weight.size(1)],
        None,
        f"x {shape(x)} and weight {shape(weight)} should be 16-bit [k, m] and [k, n], C float32 [m, n], got {shape(C)}",
        Layer.BINDING,
    )
    if call.context.execute:
        C.add_(x.float().t() @ weight.float())
