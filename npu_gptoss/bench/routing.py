"""Counts the experts that a step's tokens are routed to, in the calls of the experts' kernels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from npu_gptoss.bench.roofline import WEIGHT_BYTES, expert_parameters
from npu_gptoss.engine import Engine
from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.engine.scheduler import Chunk
from npu_gptoss.kernels.dumping import tensors
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
        return tuple(int(ids[(ids >= 0) & (ids < num_experts)].unique().numel()) for ids in self._ids)


@torch.inference_mode()
def distinct_experts(engine: Engine) -> tuple[int, ...] | None:
    """Of each layer, in the engine's next step or the one on its way, computed once more without a graph.

    Its rows are the newest token of every running request whose prompt is done. The scheduler is not asked: with a step
    launched ahead it counts that token as computed. The step's own keys are written where the engine writes the same
    ones, nothing else changes. None when the engine has nothing to run or its kernels do not show their routing.
    """
    chunks = [
        Chunk(request, len(request.token_ids) - 1, len(request.token_ids))
        for request in engine.scheduler.running
        if request.num_generated and engine.scheduler.allocator.grow(request.block_ids, len(request.token_ids))
    ]
    if not chunks:
        return None
    seen = RoutingSeen()
    with kernels_for(engine.device), observing(seen):
        batch = pack(chunks, engine.block_size, engine.device)
        engine.model.forward(batch.input_ids, batch.positions, engine.kv_caches, batch.metadata)
    distinct = seen.distinct(engine.config.num_local_experts)
    return distinct if len(distinct) == engine.config.num_hidden_layers else None


def expert_format(engine: Engine) -> str:
    """The format of the first layer's experts in memory, by their bytes, as `roofline` names it."""
    config, ranks = engine.config, engine.model.ranks
    matrix, _ = expert_parameters(config)
    held = [tensor.untyped_storage() for tensor in tensors(engine.model.layers[0].moe.experts.weights)]
    total = sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())  # views of one count once
    each = total * (1 if ranks is None else ranks.shard.size) / (config.num_local_experts * matrix)
    return min(WEIGHT_BYTES, key=lambda name: abs(WEIGHT_BYTES[name] - each))
