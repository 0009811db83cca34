"""The machine that an operator runs on: CANN version, strictness, device, formats, capture.

Kernels ask `current()`. The emulator sets one context per process (`set_default`); `use` overrides it for a block, for
example during a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from ascend_emulator import cards
from ascend_emulator.stacks import CANN_VERSIONS

FORMAT_ND = 2
FORMAT_FRACTAL_NZ = 29


@dataclass(frozen=True)
class Finding:
    """An event that hardware would not report: an undefined result outside strict mode, or a warning."""

    rule: int
    op: str
    sentence: str


def _always(tensor: torch.Tensor) -> bool:
    return True


def _nd(tensor: torch.Tensor) -> int:
    return FORMAT_ND


def _ignore_format(tensor: torch.Tensor, acl_format: int) -> None:
    return None


def _own_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes() - (tensor.storage_offset() + tensor.numel()) * tensor.element_size()


@dataclass(frozen=True)
class Group:
    """A communicator: its ranks, this one's, and the bytes of its buffer. gather(name of the call, tensor) waits for
    the same call of all ranks and returns their tensors, in the order of ranks.
    """

    ranks: int
    rank: int
    window: int
    gather: Callable[[str, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class OpContext:
    """The machine as one operator call sees it.

    cann: one of CANN_VERSIONS; decides which rules hold and which operators exist (torch_npu 2.7.1 up to 8.3).
    card: "A2" or "A3"; decides which ranks dispatch and combine take.
    strict: undefined results raise; otherwise the outputs concerned are filled with NaN.
    capturing: the call is recorded into a graph, so host reads of device memory are refused.
    execute: False runs the host's checks and returns poisoned outputs: reads and writes no tensor value.
    diagnostic_fp32: float32 is accepted for bfloat16, and nothing is rounded to bfloat16.
    tnd_max_workspace: let `_npu_fused_infer_attention_score*_get_max_workspace` answer for TND on CANN 8.3 (R37).
    defects: known defects of CANN to compute (emulator/defects.py).
    is_device, format_of: True for a tensor on the emulated device, and its storage format (2 ND, 29 FRACTAL_NZ).
    set_format: npu_format_cast calls it.
    is_whole: True if a FRACTAL_NZ tensor fills its storage; None judges by the tensor's own storage, which is wrong
        for an alias into a larger block of device memory.
    bytes_behind: bytes of a tensor's own allocation after its last element.
    group: finds a communicator by its name; None where there is none.
    findings: events that did not raise, in order.
    """

    cann: str = "8.3.rc1"
    card: str = cards.DEFAULT.kind
    strict: bool = True
    capturing: bool = False
    execute: bool = True
    diagnostic_fp32: bool = False
    tnd_max_workspace: bool = False
    defects: frozenset[str] = frozenset()
    is_device: Callable[[torch.Tensor], bool] = _always
    format_of: Callable[[torch.Tensor], int] = _nd
    set_format: Callable[[torch.Tensor, int], None] = _ignore_format
    is_whole: Callable[[torch.Tensor], bool] | None = None
    bytes_behind: Callable[[torch.Tensor], int] = _own_storage
    group: Callable[[str], Group | None] | None = None
    findings: list[Finding] = field(default_factory=list, compare=False)

    def __post_init__(self) -> None:
        if self.cann not in CANN_VERSIONS:
            raise ValueError(f"CANN version {self.cann!r} is not emulated; known: {', '.join(CANN_VERSIONS)}")

    @property
    def is_8_3(self) -> bool:
        return self.cann.startswith("8.3")

    def stands_for(self, dtype: torch.dtype, wanted: torch.dtype) -> bool:
        """True if `dtype` may be passed where `wanted` is required."""
        return dtype == wanted or (self.diagnostic_fp32 and wanted == torch.bfloat16 and dtype == torch.float32)

    def rounded(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """`tensor` after the kernel's intermediate rounding to `dtype`; unchanged in diagnostic mode."""
        if self.diagnostic_fp32 and dtype in (torch.bfloat16, torch.float32):
            return tensor
        return tensor.to(dtype)


_default = OpContext()
_current: ContextVar[OpContext | None] = ContextVar("ascend_emulator_op_context", default=None)


def current() -> OpContext:
    return _current.get() or _default


def set_default(context: OpContext) -> None:
    """Sets the context of every thread that has not entered `use`."""
    global _default
    _default = context


@contextmanager
def use(context: OpContext | None = None, **changes: object) -> Iterator[OpContext]:
    """Runs a block in `context` (default: the current one) with some fields changed."""
    entered = replace(context or current(), **changes)
    token = _current.set(entered)
    try:
        yield entered
    finally:
        _current.reset(token)
