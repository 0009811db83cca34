"""CPU views of device tensors, and poisoned allocations.

An emulated device tensor lies in host memory from the AscendCL runtime, so an op kernel works on a CPU tensor over the
same bytes ("alias"). torch_npu's caching allocator reuses blocks without asking the runtime. So every new tensor is
poisoned here, and every freed tensor as soon as torch_npu's trace reports it: with NaN in floating-point types, in
integers with a value too large to be an index by accident.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right

import torch
import torch_npu
from ascend_emulator import storage
from ascend_emulator.binding import block_of, check, library
from torch_npu.utils import _npu_trace

POISON_FLOAT, POISON_INTEGER = 0xFF, 0x7F
raw_stream = torch_npu._C._npu_getCurrentRawStream
_allocate = torch.ops.npu.empty_with_format.default


class _Blocks:
    """CPU storages over the runtime's allocations; forgotten whenever the runtime allocates or frees."""

    def __init__(self) -> None:
        self.generation = 0
        self.starts: list[int] = []
        self.storages: list[tuple[int, int, torch.UntypedStorage]] = []

    def find(self, address: int) -> tuple[int, torch.UntypedStorage]:
        generation = library.emulator_generation()
        if generation != self.generation:
            self.generation, self.starts, self.storages = generation, [], []
        index = bisect_right(self.starts, address) - 1
        if index >= 0 and address < self.storages[index][1]:
            return self.storages[index][0], self.storages[index][2]
        block = block_of(address)
        if block is None:
            raise RuntimeError(
                f"The memory at {address:#x} is not allocated on the emulated device: it was freed, or never was. [R87]"
            )
        start, size, _ = block
        buffer = (ctypes.c_char * size).from_address(start)
        whole = torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
        self.starts.insert(index + 1, start)
        self.storages.insert(index + 1, (start, start + size, whole))
        return start, whole


_blocks = _Blocks()


def alias_at(address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A CPU tensor over device memory. Raises R87 when the memory is not allocated."""
    start, block = _blocks.find(address)
    tensor = torch.empty(0, dtype=dtype, device="cpu")
    return tensor.set_(block, (address - start) // tensor.element_size(), size, stride)


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """The CPU tensor over the same bytes as a device tensor, with its size and stride."""
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    return alias_at(tensor.data_ptr(), tensor.size(), tensor.stride(), tensor.dtype)


def is_alias(tensor: torch.Tensor) -> bool:
    """True if a CPU tensor lies in device memory."""
    return tensor.numel() == 0 or block_of(tensor.data_ptr()) is not None


def _poison_of(dtype: torch.dtype) -> int:
    return POISON_FLOAT if dtype.is_floating_point else 1 if dtype == torch.bool else POISON_INTEGER


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Overwrites a new device tensor in stream order (and, while capturing, at every replay)."""
    if tensor.numel():
        stream = raw_stream(tensor.device.index)
        size = tensor.numel() * tensor.element_size()
        code = library.emulator_poison(stream, tensor.data_ptr(), size, _poison_of(tensor.dtype))
        check("emulator_poison", code)
    return tensor


def _new(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    tensor = _allocate(size, dtype=dtype, device=device)
    address, bytes_ = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    storage.forget_at(address, bytes_)
    _living[address] = bytes_, _poison_of(dtype)
    return tensor


_living: dict[int, tuple[int, int]] = {}  # address -> bytes and poison of the tensor that was allocated there


def bytes_behind(alias: torch.Tensor) -> int:
    """Bytes of its allocation after the last element of a CPU tensor in device memory."""
    address = alias.data_ptr()
    first = max((start for start in _living if start <= address), default=address)
    size, _ = _living.get(first, (0, 0))
    return max(first + size - address - alias.numel() * alias.element_size(), 0)


def _poison_freed(address: int) -> None:
    """torch_npu calls this when a storage loses its last owner, before its allocator takes the block back."""
    freed = _living.pop(address, None)
    if freed is not None:
        library.emulator_poison_freed(address, *freed)


def _that_frees(kind: type) -> type:
    """The class whose deallocator frees a tensor of this kind: itself in torch 2.7, a base of it in 2.10."""

    def deallocator(one: type) -> int | None:
        return ctypes.c_void_p.from_address(id(one) + 6 * ctypes.sizeof(ctypes.c_void_p)).value  # tp_dealloc

    pythons = deallocator(type("Plain", (), {}))  # it calls the deallocator of the next base that has another
    return next(one for one in kind.__mro__ if deallocator(one) != pythons)


def watch_frees() -> None:
    """Enables the trace of torch_npu's sanitizer; keeps an exception alive when tensors die with it."""
    fetch, restore = (
        ctypes.cast(f, ctypes.c_void_p) for f in (ctypes.pythonapi.PyErr_Fetch, ctypes.pythonapi.PyErr_Restore)
    )
    for kind in (torch.Tensor, torch.nn.Parameter):
        library.emulator_keep_errors(_that_frees(kind), fetch, restore)
    _npu_trace.register_callback_for_npu_memory_deallocation(_poison_freed, "poison of freed memory")
    torch_npu._C._activate_npu_trace(0)


def unwritten(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A contiguous device tensor with the old content of the allocator's block."""
    return _new(size, dtype, device)


def unwritten_strided(
    size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    extent = 0 if 0 in size else 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    return _new((extent,), dtype, device).as_strided(size, stride)


def contiguous_stride(size: tuple[int, ...], memory_format: torch.memory_format | None) -> tuple[int, ...] | None:
    """Strides of a channels-last tensor; None for a contiguous one."""
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return None
    return torch.empty(size, dtype=torch.uint8, device="meta", memory_format=memory_format).stride()
