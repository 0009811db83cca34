"""Triton's interpreter reads and writes any address that a kernel computes, as a GPU does, and often nothing shows.

Here each address that a kernel loads, stores or adds to must lie within one of the launch's tensors. Import this module
before a kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

ACCESSES = ("create_masked_load", "create_masked_store", "create_atomic_rmw")
_spans: list[tuple[int, int]] = []  # of the tensors of the launch under way: first address, and the one behind the last

pointed: list[torch.Tensor] = []  # tensors whose addresses stand in a tensor of the launch


class OutsideError(AssertionError):
    """An address within no tensor of the launch."""


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor that may be a view: from its first element to behind its last one."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def check(what: str, pointers: np.ndarray, mask: np.ndarray, width: int) -> None:
    """Raises OutsideError for an address that the mask lets through."""
    asked = np.unique(pointers[np.broadcast_to(mask, pointers.shape).astype(bool)]).astype(np.int64)
    inside = np.zeros(asked.shape, bool)
    for first, end in _spans:
        inside |= (asked >= first) & (asked + width <= end)
    if not inside.all():
        raise OutsideError(f"{what}: {np.count_nonzero(~inside)} of {asked.size} addresses are within no tensor")


def _launch(original: Callable[..., Any]) -> Callable[..., Any]:
    def on_the_host(self: Any, arguments: Any, options: Any) -> Any:
        here, named = original(self, arguments, options)
        given = [getattr(each, "base", each) for each in (*here, *named.values())]  # a descriptor has a base
        tensors = [interpreter._unwrap_tensor(each) for each in given if hasattr(each, "data_ptr")]
        _spans[:] = [span(each) for each in (*tensors, *pointed)]
        return here, named

    return on_the_host


def _access(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    pointers_at, mask_at = (1, 3) if name == "create_atomic_rmw" else (0, 2 if name == "create_masked_store" else 1)

    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        pointers = arguments[pointers_at]
        width = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        check(name, pointers.data, arguments[mask_at].data, width)
        return original(self, *arguments, **options)

    return checked


_executor, _builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
_executor._init_args_hst = _launch(_executor._init_args_hst)
for _name in ACCESSES:
    setattr(_builder, _name, _access(_name, getattr(_builder, _name)))
