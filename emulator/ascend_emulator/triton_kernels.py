"""The Triton kernels of a vLLM step, by module and name; each runs as one kernel of the device.

Used without Triton-Ascend; with it the kernels themselves run (`triton_launches.py`). Without Triton, vLLM leaves a
kernel as a Python function that cannot be launched. This table makes its kernels launchable; others end in vLLM's own
error. vllm-ascend computes rotary embedding and penalties another way without Triton, unlike on a card.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ascend_emulator import context, graphs, settings
from ascend_emulator.calls import Operation, leaves
from ascend_emulator.ops.slots import Grid, compute_slot_mapping


class Kernel:
    """Launches as Triton does: `kernel[grid](*arguments)`. function: takes the grid, then the kernel's arguments."""

    def __init__(self, name: str, function: Callable[..., None], writes: frozenset[int]) -> None:
        self.operation = Operation(f"triton::{name}", self._run, ours=True, writes=frozenset(1 + i for i in writes))
        self.function = function

    def _run(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        if context.current().execute:
            self.function(grid, *arguments, **constants)

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            device = next(tensor.device for tensor in leaves(list(arguments)) if tensor.is_npu)
            graphs.launch(self.operation, (grid, *arguments), constants, device)

        return launch


KERNELS: dict[str, dict[str, tuple[Callable[..., None], frozenset[int]]]] = {
    "vllm.v1.worker.block_table": {"_compute_slot_mapping_kernel": (compute_slot_mapping, frozenset({7}))},
}


def provide(module: ModuleType) -> None:
    """Makes the kernels of a module launchable; with Triton-Ascend they already are.

    Releases of vLLM that lack a kernel of the table do not need it.
    """
    if settings.text("TRITON"):
        return
    for name, (function, writes) in KERNELS[module.__name__].items():
        if hasattr(module, name):
            setattr(module, name, Kernel(name, function, writes))
