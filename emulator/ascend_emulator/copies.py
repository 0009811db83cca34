"""Copies between host and device, as torch_npu 2.7.1 makes them (csrc/aten/ops/op_api/CopyKernelOpApi.cpp).

Host to device: converted and made contiguous on the host when it must be, then one memcpy: asynchronous when
non_blocking, otherwise preceded by a synchronisation of the stream. Device to host the other way round.
"""

from __future__ import annotations

import torch
from ascend_emulator import graphs, memory
from ascend_emulator.binding import DEVICE_TO_HOST, HELD_UP, HOST_TO_DEVICE, IDLE, check, library
from ascend_emulator.calls import Operation

_in_flight: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by stream: copies that it has not made yet
_on_device = Operation("aten::copy_", torch.ops.aten.copy_.default, ours=False, writes=frozenset({0}))


def _transfer(target: torch.Tensor, source: torch.Tensor, kind: int, stream: int, non_blocking: bool) -> None:
    size = source.numel() * source.element_size()
    if size == 0:
        return
    if non_blocking:
        code = library.aclrtMemcpyAsync(target.data_ptr(), size, source.data_ptr(), size, kind, stream)
        check("aclrtMemcpyAsync", code)
        state = library.emulator_acquire(stream)
        if state == HELD_UP:  # torch_npu's allocator of pinned memory gives none away that a copy will read or write
            _in_flight.setdefault(stream, []).append((target, source))
        elif state == IDLE:
            library.emulator_release(stream)
            _in_flight.pop(stream, None)
    else:
        check("aclrtSynchronizeStreamWithTimeout", library.aclrtSynchronizeStream(stream))
        check("aclrtMemcpy", library.aclrtMemcpy(target.data_ptr(), size, source.data_ptr(), size, kind))


def _host_to_device(target: torch.Tensor, source: torch.Tensor, stream: int, non_blocking: bool) -> None:
    if source.dtype != target.dtype or source.size() != target.size() or not source.is_contiguous():
        source = source.to(target.dtype).expand_as(target).contiguous()
    if target.is_contiguous():
        _transfer(target, source, HOST_TO_DEVICE, stream, non_blocking)
        return
    dense = memory.unwritten(target.size(), target.dtype, target.device)
    _transfer(dense, source, HOST_TO_DEVICE, stream, non_blocking)
    graphs.launch(_on_device, (target, dense), {}, target.device)


def _device_to_host(target: torch.Tensor, source: torch.Tensor, stream: int, non_blocking: bool) -> None:
    if not source.is_contiguous():
        dense = memory.unwritten(source.size(), source.dtype, source.device)
        graphs.launch(_on_device, (dense, source), {}, source.device)
        source = dense
    if target.dtype == source.dtype and target.size() == source.size() and target.is_contiguous():
        _transfer(target, source, DEVICE_TO_HOST, stream, non_blocking)
        return
    dense = torch.empty(source.size(), dtype=source.dtype, device="cpu")
    _transfer(dense, source, DEVICE_TO_HOST, stream, False)
    target.copy_(dense)


def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """aten::copy_ with at least one operand on the device."""
    if self.numel() == 0:
        return self
    if self.is_npu and src.is_npu:
        graphs.launch(_on_device, (self, src), {}, self.device)
    elif self.is_npu:
        _host_to_device(self, src, memory.raw_stream(self.device.index), non_blocking)
    else:
        _device_to_host(self, src, memory.raw_stream(src.device.index), non_blocking)
    return self


def local_scalar_dense(self: torch.Tensor) -> int | float | bool:
    """`.item()`: an asynchronous copy to the host, then a synchronisation of the stream."""
    stream = memory.raw_stream(self.device.index)
    check("aclrtSynchronizeStreamWithTimeout", library.aclrtSynchronizeStream(stream))
    value = torch.empty((), dtype=self.dtype, device="cpu")
    size = self.element_size()
    check("aclrtMemcpy", library.aclrtMemcpy(value.data_ptr(), size, self.data_ptr(), size, DEVICE_TO_HOST))
    return value.item()
