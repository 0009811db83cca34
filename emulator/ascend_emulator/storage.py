"""Storage formats other than ND, by device address, because contracts ask with CPU aliases.

torch_npu keeps the format in its own description of a storage, which nothing outside can change. It is right after
`npu_format_cast`; after the in-place `npu_format_cast_` only the contracts know the new format, and
`torch_npu.get_npu_format` still answers ND.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass

import torch
from ascend_emulator.context import FORMAT_ND
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass
class _Formatted:
    size: int
    elements: int
    format: int
    owner: StorageWeakRef | None  # None: cast in place through an alias


_starts: list[int] = []
_known: dict[int, _Formatted] = {}


def _forget(start: int) -> None:
    if _known.pop(start, None) is not None:
        _starts.remove(start)


def _find(address: int) -> tuple[int, _Formatted] | None:
    index = bisect_right(_starts, address) - 1
    if index < 0:
        return None
    start = _starts[index]
    entry = _known[start]
    if entry.owner is not None and entry.owner.expired():
        _forget(start)
        return None
    return (start, entry) if address < start + entry.size else None


def _note(start: int, entry: _Formatted) -> None:
    if start not in _known:
        insort(_starts, start)
    _known[start] = entry


def remember(tensor: torch.Tensor, acl_format: int) -> None:
    """Records a device tensor that was made in this format."""
    storage = tensor.untyped_storage()
    _note(tensor.data_ptr(), _Formatted(storage.nbytes(), tensor.numel(), acl_format, StorageWeakRef(storage)))


def format_of(alias: torch.Tensor) -> int:
    """The format of the storage under a CPU alias of a device tensor, or under the device tensor itself."""
    found = _find(alias.data_ptr()) if _known and alias.numel() else None
    return found[1].format if found else FORMAT_ND


def set_format(alias: torch.Tensor, acl_format: int) -> None:
    """The in-place cast."""
    if acl_format == FORMAT_ND:
        _forget(alias.data_ptr())
    else:
        size = alias.numel() * alias.element_size()
        _note(alias.data_ptr(), _Formatted(size, alias.numel(), acl_format, None))


def is_whole(alias: torch.Tensor) -> bool:
    """True if a tensor fills its storage, as far as known; always in ND."""
    found = _find(alias.data_ptr()) if alias.numel() else None
    return found is None or (found[0] == alias.data_ptr() and found[1].elements == alias.numel())


def forget_at(start: int, size: int) -> None:
    """Forgets in-place casts of memory that is allocated anew."""
    if _known:
        for known in [k for k in _starts if start <= k < start + max(size, 1)]:
            _forget(known)
