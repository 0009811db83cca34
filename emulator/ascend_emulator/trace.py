"""The trace of a process's use of the device: one JSON line per operator, copy, synchronisation and graph event.

The runtime writes copies, synchronisations, collectives and graphs (machine.cpp, `trace`). This module writes operators
through the same file descriptor, and so in order. Phases: `eager` (ran at once), `queued` (ran later, behind a blocked
stream), `capture` (recorded, not run), `replay`, `update`.
Bytes are the minimum of an ideal kernel: each operand once; for look-ups and scatters only the rows touched. A kernel
of the op table may state other bytes, and a number of kernels, with an attribute `traffic`; a Triton kernel counts the
bytes that it touches (`compiler/touched.py`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from ascend_emulator.binding import library
from ascend_emulator.ops.table import Traffic

ENABLED = bool(library.emulator_tracing())
# operators that read only as much of their first operand as they return
GATHERS = frozenset({"index", "index_select", "embedding", "gather", "take", "select_copy", "slice_copy"})


def _index_put(
    target: torch.Tensor,
    indices: list[torch.Tensor | None],
    values: torch.Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> tuple[int, bool]:
    elements = torch.ops.aten.index(target.new_empty(()).expand(target.size()), indices)  # masks among the indices too
    return elements.numel(), accumulate


# operators that write some elements of their first operand only -> how many, and True if they read these too
SCATTERS: dict[str, Callable[..., tuple[int, bool]]] = {
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "scatter_": lambda target, dim, index, *_, **__: (index.numel(), False),
    "index_copy_": lambda target, dim, index, source: (source.numel(), False),
}


def _base(name: str) -> str:
    """Returns the name without namespace and overload."""
    return name.partition("::")[2].partition(".")[0]


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def scattered(
    name: str, args: Sequence[Any], kwargs: dict[str, Any], operands: Iterable[torch.Tensor]
) -> Traffic | None:
    """Bytes of a scatter into its first argument; None for any other operator. `operands`: all tensors of the call."""
    touched = SCATTERS.get(_base(name))
    if touched is None:
        return None
    elements, reads = touched(*args, **kwargs)
    target, *others = operands
    written = elements * target.element_size()
    return Traffic(sum(map(bytes_of, others)) + reads * written, written)


def _describe(tensors: Iterable[torch.Tensor]) -> list[list[object]]:
    return [[str(tensor.dtype)[6:], list(tensor.shape)] for tensor in tensors]


def traffic(
    name: str, inputs: Sequence[torch.Tensor], written: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]
) -> Traffic:
    """Bytes read and written. `inputs` includes the operands in `written`; `fresh`: results in new memory."""
    out = sum(map(bytes_of, fresh)) + sum(map(bytes_of, written))
    base = _base(name)
    if base in GATHERS and inputs:
        return Traffic(out + sum(map(bytes_of, inputs[1:])), out)
    overwritten = {id(tensor) for tensor in written} if base.endswith(("copy_", "fill_", "zero_")) else set()
    return Traffic(sum(bytes_of(tensor) for tensor in inputs if id(tensor) not in overwritten), out)


def operator(
    name: str,
    phase: str,
    stream: int,
    inputs: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    fresh: Sequence[torch.Tensor],
    *,
    graph: int = 0,
    moved: Traffic | None = None,
) -> None:
    """Writes an operator's line."""
    moved = moved or traffic(name, inputs, written, fresh)
    fields = {
        "event": "op",
        "name": name,
        "phase": phase,
        "stream": stream,
        "graph": graph,
        "inputs": _describe(inputs),
        "outputs": _describe([*written, *fresh]),
        "read": moved.read,
        "written": moved.written,
        "launches": moved.launches,
    }
    write(fields)


def write(fields: dict[str, object]) -> None:
    """Writes any other line; the runtime adds pid and time."""
    if ENABLED:
        library.emulator_trace(json.dumps(fields)[1:-1].encode())


def mark(name: str, **fields: object) -> None:
    """Writes a named point, for instance the begin of a step or a layer. Free without a trace."""
    write({"event": "mark", "name": name, **fields})
