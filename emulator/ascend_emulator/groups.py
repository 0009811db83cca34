"""Communicators of this process as an operator's kernel finds them: by the name that torch_npu gives a group."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_uint32, c_uint64, c_void_p

import torch
from ascend_emulator.binding import library
from ascend_emulator.context import Group

_library = ctypes.CDLL("libhccl.so")


def find(name: str) -> Group | None:
    """The group; None if no communicator has the name."""
    ranks, rank, window = c_uint32(), c_uint32(), c_uint64()
    if not _library.emulator_group(name.encode(), byref(ranks), byref(rank), byref(window)):
        return None

    def gather(what: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        mine = tensor.contiguous()
        every = mine.new_empty((ranks.value, *mine.shape))
        size = mine.numel() * mine.element_size()
        places = (c_void_p(mine.data_ptr()), c_uint64(size), c_void_p(every.data_ptr()))
        if _library.emulator_gather(name.encode(), what.encode(), *places):
            raise RuntimeError(library.aclGetRecentErrMsg().decode(errors="replace"))
        return list(every)

    return Group(ranks.value, rank.value, window.value, gather)
