"""Which experts a step's tokens are routed to, seen in the calls of the experts' kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from npu_gptoss.bench.roofline import WEIGHT_BYTES, expert_parameters
from npu_gptoss.engine import Engine
from npu_gptoss.engine.batch import pack
from npu_gptoss.engine.device import kernels_for
from npu_gptoss.engine.scheduler import Chunk
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


def next_tokens(engine: Engine) -> list[Chunk]:
    """The newest token of every running request whose prompt is done: the engine's next step, or one on its way.

    With a step launched ahead the scheduler already counts that token as computed, so it is not asked.
    """
    running = [request for request in engine.scheduler.running if request.num_generated]
    return [
        Chunk(request, len(request.token_ids) - 1, len(request.token_ids))
        for request in running
        if engine.scheduler.allocator.grow(request.block_ids, len(request.token_ids))
    ]


@torch.inference_mode()
def distinct_experts(engine: Engine) -> tuple[int, ...] | None:
    """Of each layer, in the step of `next_tokens`, computed once more without a graph.

    The step's own keys are written where the engine writes the same ones, nothing else changes. None when the
    engine has nothing to run or its kernels do not show their routing.
    """
    chunks = next_tokens(engine)
    if not chunks:
        return None
    seen = RoutingSeen()
    with kernels_for(engine.device), observing(seen):
        batch = pack(chunks, engine.block_size, engine.device)
        engine.model.forward(batch.input_ids, batch.positions, engine.kv_caches, batch.metadata)
    distinct = seen.distinct(engine.config.num_local_experts)
    return distinct if len(distinct) == engine.config.num_hidden_layers else None


def expert_format(engine: Engine) -> str:
    """The format in which the first layer's experts lie in memory, told by their bytes: what `roofline` counts in."""
    config = engine.config
    held = engine.model.layers[0].moe.experts.weights
    matrix, _ = expert_parameters(config)
    ranks = engine.model.ranks  # each holds its share of them
    each = sum(_storages(held).values()) * (1 if ranks is None else ranks.shard.size)
    each /= config.num_local_experts * matrix
    return min(WEIGHT_BYTES, key=lambda name: abs(WEIGHT_BYTES[name] - each))


def _storages(value: Any) -> dict[int, int]:
    """The bytes of all tensors within, by their memory, so that views of one count once."""
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    if isinstance(value, Mapping):
        parts = list(value.values())
    elif isinstance(value, (list, tuple)):
        parts = list(value)
    elif is_dataclass(value):
        parts = [getattr(value, field.name) for field in fields(value)]
    else:
        return {}
    return {place: size for part in parts for place, size in _storages(part).items()}
