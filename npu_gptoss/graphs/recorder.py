"""Captures work on a device: CUDA graphs and ACL graphs through the one interface that torch gives both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from npu_gptoss.errors import InputError

GRAPH_CLASSES = {"cuda": "CUDAGraph", "npu": "NPUGraph"}
# cuBLAS, Triton and torch's allocator set themselves up at the first call, which a capture cannot hold.
WARM_UPS = 2


class Graph(Protocol):
    def replay(self) -> None: ...


@dataclass(frozen=True)
class Recorded:
    """Captured work. `result`: its tensors, which every replay writes at the same addresses."""

    graph: Graph
    result: Any

    def replay(self) -> Any:
        self.graph.replay()
        return self.result


class Recorder:
    """Captures on one device, into one pool of memory.

    Graphs of one recorder must not run at the same time: they overwrite each other's results in the pool. Record the
    largest first: the smaller ones then fit into its memory.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type not in GRAPH_CLASSES:
            raise InputError(
                f"graphs can be captured on {' or '.join(sorted(GRAPH_CLASSES))}, not on {device.type}: choose none",
                field="graphs",
            )
        self.device = device
        self._module = torch.get_device_module(device)
        self._pool = self._module.graph_pool_handle()

    def record(self, work: Callable[[], Any]) -> Recorded:
        """Runs `work` to warm up, then captures it. It must read and write fixed tensors only, and ask no device.

        A capture computes nothing, so one replay follows: the next capture finds this result filled.
        """
        with self._module.device(self.device):
            current = self._module.current_stream()
            aside = self._module.Stream()
            aside.wait_stream(current)
            with self._module.stream(aside):
                for _ in range(WARM_UPS):
                    work()
            current.wait_stream(aside)
            graph = getattr(self._module, GRAPH_CLASSES[self.device.type])()
            try:
                with self._module.graph(graph, pool=self._pool):
                    result = work()
            except RuntimeError as error:
                self._leave_capture(current)
                raise InputError(
                    f"a step cannot be captured with the kernels selected for it ({error}): choose graphs=none, or "
                    "kernels that ask the device nothing (`npu-gptoss kernels explain`)",
                    field="graphs",
                ) from error
            graph.replay()
        return Recorded(graph, result)

    def _leave_capture(self, stream: Any) -> None:
        """Ends a capture that broke off: torch stays on its stream, and its generator refuses every random number."""
        self._module.set_stream(stream)
        if self.device.type == "cuda":
            ours = self._module.default_generators[self._module.current_device()]
            fresh = torch.Generator(self.device).manual_seed(ours.initial_seed())
            ours.graphsafe_set_state(fresh.graphsafe_get_state())
