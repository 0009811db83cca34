"""Which experts a step's tokens are routed to, seen in the calls of the experts' kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_gptoss.engine import Engine
from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.kernels.profiling import observing

ROUTED = "topk_ids"  # the argument of every kernel of moe.experts that names the experts, [tokens, k]


class RoutingSeen:
    """Keeps the number of distinct experts of each call that says which experts its tokens go to."""

    def __init__(self) -> None:
        self._ids: list[torch.Tensor] = []

    def __call__(self, name: str, arguments: Mapping[str, Any]) -> None:
        ids = arguments.get(ROUTED)
        if name.startswith("moe.experts") and isinstance(ids, torch.Tensor):
            self._ids.append(ids.clone())  # a graph or the next layer may write to the same memory

    def distinct(self, num_experts: int) -> tuple[int, ...]:
        """Of each call, in order; ids outside the experts (of unwritten slots) do not count."""
        valid = [ids[(ids >= 0) & (ids < num_experts)] for ids in self._ids]
        return tuple(int(ids.unique().numel()) for ids in valid)


@torch.inference_mode()
def distinct_experts(engine: Engine) -> tuple[int, ...] | None:
    """Of each layer, in the step that the engine would run next, computed once without a graph.

    The step's own keys are written where the engine will write the same ones, nothing else changes. None when the
    engine has nothing to run or its kernels do not show their routing.
    """
    chunks = engine.scheduler.schedule()
    if not chunks:
        return None
    seen = RoutingSeen()
    with kernels_for(engine.device), observing(seen):
        batch = pack(chunks, engine.block_size, engine.device)
        engine.model.forward(batch.input_ids, batch.positions, engine.kv_caches, batch.metadata)
    distinct = seen.distinct(engine.config.num_local_experts)
    return distinct if len(distinct) == engine.config.num_hidden_layers else None
