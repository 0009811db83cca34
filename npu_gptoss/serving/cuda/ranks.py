"""vLLM's tensor parallel group as the ranks that share a model."""

from __future__ import annotations

import torch

from npu_gptoss.model.ranks import Ranks
from npu_gptoss.model.sharding import EXPERT, TENSOR, Shard
from npu_gptoss.serving.releases.vllm import (
    VllmConfig,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)


class TensorParallel(Ranks):
    """Sums and gathers with vLLM's communicators, which have the fast paths and support graphs."""

    @classmethod
    def of(cls, config: VllmConfig) -> TensorParallel | None:
        """Returns None if this rank has the whole model."""
        size = get_tensor_model_parallel_world_size()
        experts = EXPERT if config.parallel_config.enable_expert_parallel else TENSOR
        return None if size == 1 else cls(Shard(get_tensor_model_parallel_rank(), size, experts))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor_model_parallel_all_reduce(tensor)

    def side_by_side(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        whole = tensor_model_parallel_all_gather(tensor, -1)
        return whole if out is None else out.copy_(whole)
