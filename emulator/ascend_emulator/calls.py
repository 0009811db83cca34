"""One operator call: run at once, only checked, or kept for later.

A call that is captured into a graph, or queued behind a blocked stream, runs later. At the launch its contract is
checked and its outputs are allocated, as the real host code does. It keeps addresses, sizes and strides of device
tensors, and copies of host arguments, as a real launch does. A later run reads what the addresses hold then.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from ascend_emulator import context, memory, trace
from ascend_emulator.binding import block_of
from ascend_emulator.rules import ContractError
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class TensorRef:
    """A device tensor as a launched kernel knows it. `owner` shows if its storage is still alive, as it must be for a
    replay if `watched`; None: the memory is a graph's own."""

    address: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    owner: StorageWeakRef | None = field(default=None, compare=False)
    watched: bool = field(default=True, compare=False)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorRef:
        block = block_of(tensor.data_ptr()) if tensor.numel() else None
        # Memory of a graph's own pool lives as long as the graph: vLLM drops the tensors and keeps the addresses.
        owner = StorageWeakRef(tensor.untyped_storage()) if block is not None and not block[2] else None
        return cls(tensor.data_ptr(), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype, owner)

    def alias(self) -> torch.Tensor:
        if 0 in self.size:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")
        return memory.alias_at(self.address, self.size, self.stride, self.dtype)

    def check_alive(self, operation: str) -> None:
        if self.watched and self.owner is not None and self.owner.expired():
            raise ContractError(
                f"{operation}: a tensor {list(self.size)} at {self.address:#x} was captured and has been freed or "
                "re-bound since: the replay would read what now lies there. [R87]",
                87,
            )


def convert(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    """Applies `change` to everything of this kind in `value`; searches lists and tuples."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list):
        return [convert(item, change, kind) for item in value]
    if isinstance(value, tuple):
        return tuple(convert(item, change, kind) for item in value)
    return value


def leaves(value: Any, kind: type = torch.Tensor) -> Iterator[Any]:
    if isinstance(value, kind):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item, kind)


class Aliases:
    """CPU views of one call's device tensors, and the map from results back to operands."""

    def __init__(self) -> None:
        self.pairs: list[tuple[torch.Tensor, Any]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_npu:
            return tensor
        view = memory.alias(tensor)
        self.pairs.append((view, tensor))
        return view

    def of_ref(self, ref: TensorRef) -> torch.Tensor:
        view = ref.alias()
        self.pairs.append((view, ref))
        return view

    def original(self, view: torch.Tensor) -> Any:
        """The device tensor that `view` was made from, or None when the result is new."""
        for candidate, tensor in self.pairs:
            if candidate is view:
                return tensor
        return None


class Scratch:
    """All-zero stand-ins for device tensors, to find out a call's results without running it.

    Tensors that share memory share it here too. Untouched pages are free, so the size does not matter.
    """

    def __init__(self) -> None:
        self.storages: dict[int, torch.UntypedStorage] = {}
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_npu:
            return tensor
        storage = tensor.untyped_storage()
        if storage.nbytes() == 0 or tensor.numel() == 0:
            view = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        else:
            if storage.data_ptr() not in self.storages:
                pages = mmap.mmap(-1, storage.nbytes() + tensor.element_size())
                self.storages[storage.data_ptr()] = torch.frombuffer(pages, dtype=torch.uint8).untyped_storage()
            view = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
                self.storages[storage.data_ptr()], tensor.storage_offset(), tensor.size(), tensor.stride()
            )
        self.pairs.append((view, tensor))
        return view

    original = Aliases.original


@dataclass
class Operation:
    """An operator of the dispatcher with its properties."""

    name: str  # with namespace and overload
    function: Callable[..., Any]  # works on CPU tensors
    ours: bool  # from the op table: checks contracts and knows `execute=False`
    writes: frozenset[str | int] = frozenset()  # arguments that it writes: positions and names
    scratch: frozenset[str | int] = frozenset()  # its workspace, which an update may replace

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any], kind: type = torch.Tensor) -> list[Any]:
        found = [args[key] for key in self.writes if isinstance(key, int) and key < len(args)]
        found += [kwargs[key] for key in self.writes if isinstance(key, str) and key in kwargs]
        return list(leaves(found, kind))

    def traffic(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> trace.Traffic | None:
        """Bytes moved, where they do not follow from the operands; None where they do."""
        measure = getattr(self.function, "traffic", None)
        if measure is not None:
            return measure(*args, **kwargs)
        return trace.scattered(self.name, args, kwargs, leaves([*args, *kwargs.values()]))


@dataclass
class Call:
    """A call to run later: once from a queue, at each replay from a graph."""

    operation: Operation
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[TensorRef | None]  # where new results go, in the order of the result's leaves; None: an operand
    phase: str

    @classmethod
    def of(
        cls, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any], results: list[Any], phase: str
    ) -> Call:
        def freeze(tensor: torch.Tensor) -> Any:
            return TensorRef.of(tensor) if tensor.is_npu else tensor.clone()

        return cls(
            operation,
            tuple(convert(list(args), freeze)),
            {name: convert(value, freeze) for name, value in kwargs.items()},
            [TensorRef.of(result) if result is not None else None for result in results],
            phase,
        )

    def references(self) -> list[TensorRef]:
        """The device tensors of the call, without its workspace."""
        scratch = self.operation.scratch
        values = [value for position, value in enumerate(self.args) if position not in scratch]
        values += [value for name, value in self.kwargs.items() if name not in scratch]
        return list(leaves(values, TensorRef))

    def lose_results(self) -> None:
        """NaN in every number that the call has just written, for the defect first-replay."""
        written = self.operation.written(self.args, self.kwargs, TensorRef)
        for reference in [*leaves(self.results, TensorRef), *written]:
            if reference.dtype.is_floating_point:
                reference.alias().fill_(float("nan"))

    def run(self, stream: int, graph: int) -> None:
        aliases = Aliases()
        if graph:
            for reference in self.references():
                reference.check_alive(self.operation.name)
        args = convert(self.args, aliases.of_ref, TensorRef)
        kwargs = {name: convert(value, aliases.of_ref, TensorRef) for name, value in self.kwargs.items()}
        with torch.no_grad(), context.use(capturing=False, execute=True):
            outputs = list(leaves(self.operation.function(*args, **kwargs)))
        fresh = []
        for output, target in zip(outputs, self.results, strict=True):
            if target is not None:
                view = target.alias()
                if view.size() != output.size():
                    raise RuntimeError(
                        f"{self.operation.name} returned {list(output.size())} when it ran and "
                        f"{list(view.size())} was allocated when it was launched: its size depends on values"
                    )
                view.copy_(output)
                fresh.append(view)
        if trace.ENABLED:
            inputs = list(leaves([*args, *kwargs.values()]))
            trace.operator(
                self.operation.name,
                "replay" if graph else self.phase,
                stream,
                inputs,
                self.operation.written(args, kwargs),
                fresh,
                graph=graph,
                moved=self.operation.traffic(args, kwargs),
            )


# Calls that the runtime knows by number.
_waiting: dict[int, Call] = {}
_numbers = itertools.count(1)


def keep(call: Call) -> int:
    number = next(_numbers)
    _waiting[number] = call
    return number


def kept(number: int) -> Call | None:
    return _waiting.get(number)


def drop(number: int) -> None:
    _waiting.pop(number, None)
