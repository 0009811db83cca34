"""Device operators without arithmetic: allocation, copies, formats. They replace torch_npu's kernels whole.

`npu_format_cast` returns a tensor with the requested format (FRACTAL_NZ = 29) and the real padding, but its bytes stay
in logical order. So a read in the wrong format gives no garbage, unlike on a real device; contracts check formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from ascend_emulator import context, copies, memory, storage
from ascend_emulator.calls import Operation

_cast = Operation("npu::npu_format_cast", torch.ops.aten.copy_.default, ours=False, writes=frozenset({0}))


def _device(device: torch.device | None) -> torch.device:
    index = None if device is None else device.index
    return torch.device("npu", torch.npu.current_device() if index is None else index)


def empty(
    size: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    stride = memory.contiguous_stride(tuple(size), memory_format)
    dtype = dtype or torch.get_default_dtype()
    if stride is None:
        return memory.poison(memory.unwritten(size, dtype, _device(device)))
    return memory.poison(memory.unwritten_strided(tuple(size), stride, dtype, _device(device)))


def empty_strided(
    size: list[int],
    stride: list[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    dtype = dtype or torch.get_default_dtype()
    return memory.poison(memory.unwritten_strided(tuple(size), tuple(stride), dtype, _device(device)))


def new_empty_strided(self: torch.Tensor, size: list[int], stride: list[int], **options: Any) -> torch.Tensor:
    dtype, device = options.get("dtype") or self.dtype, options.get("device") or self.device
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def empty_like(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    target = device or self.device
    if target.type != "npu":
        return torch.empty_like(self.to("meta"), dtype=dtype, device=target, pin_memory=bool(pin_memory))
    template = torch.empty_strided(self.size(), self.stride(), dtype=self.dtype, device="meta")
    result = torch.empty_like(template, dtype=dtype, memory_format=memory_format or torch.preserve_format)
    return torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device=target)


def format_cast(self: torch.Tensor, acl_format: int | torch.Tensor, customize_dtype: int | None = None) -> torch.Tensor:
    from ascend_emulator import graphs
    from ascend_emulator.ops import OPS

    wanted = int(torch_npu.get_npu_format(acl_format)) if isinstance(acl_format, torch.Tensor) else int(acl_format)
    if storage.format_of(self) == wanted:
        return self
    with context.use(execute=False, set_format=lambda tensor, acl_format: None):
        OPS["npu::npu_format_cast"](memory.alias(self), wanted, customize_dtype)
    result = torch.ops.npu.empty_with_format(list(self.size()), dtype=self.dtype, device=self.device, acl_format=wanted)
    storage.forget_at(result.data_ptr(), result.untyped_storage().nbytes())
    if wanted != context.FORMAT_ND:
        storage.remember(result, wanted)
    graphs.launch(_cast, (result, self), {}, self.device)
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::empty.memory_format": empty,
    "aten::empty_strided": empty_strided,
    "aten::new_empty_strided": new_empty_strided,
    "aten::empty_like": empty_like,
    "aten::copy_": copies.copy_,
    "aten::_local_scalar_dense": copies.local_scalar_dense,
    "npu::npu_format_cast": format_cast,
    "npu::npu_format_cast.Tensor": format_cast,
    "npu::_npu_format_cast": format_cast,
}
