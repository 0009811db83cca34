"""Shows kernel calls: by name in a torch profile (`attention.paged.small_ops query=[7, 8, 64] …`), and to observers.

Without a profiler or an observer a call costs the two look-ups of `watched`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.autograd import profiler

Observer = Callable[[str, Mapping[str, Any]], None]

_observers: list[Observer] = []


def watch(observer: Observer) -> None:
    """`observer(kernel's name, its arguments)` is called before every kernel call of the process, from now on."""
    _observers.append(observer)


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Like `watch`, inside the block. Kernels that a graph replays are not called, so no observer sees them."""
    watch(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def watched() -> bool:
    """True when a torch profiler is active or an observer is registered.

    The flag is private to torch; where a release lacks it, the range is always opened (about 10 us a call).
    """
    return bool(_observers) or getattr(profiler, "_is_profiler_enabled", True)


def kernel_scope(name: str, arguments: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """A profiler range around a kernel call while a torch profiler is active, else nothing; calls the observers."""
    for observer in _observers:
        observer(name, arguments)
    if not getattr(profiler, "_is_profiler_enabled", True):
        return nullcontext()
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    shapes = " ".join(f"{key}={list(tensor.shape)}" for key, tensor in tensors.items())
    return profiler.record_function(f"{name} {shapes}".rstrip())
