"""The ranks that share a model: sums, gathers and values of rank 0. One process a device, torch.distributed's group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from npu_gptoss.errors import InputError
from npu_gptoss.model.sharding import TENSOR, Shard


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks of torch.distributed's default group."""

    shard: Shard

    @classmethod
    def of_this_process(cls, experts: str = TENSOR) -> Ranks:
        """The default group, which must be initialized: NCCL for GPUs, gloo for CPUs."""
        if not dist.is_initialized():
            raise InputError(
                "torch.distributed is not initialized: start one process a device, for instance with torchrun",
                field="torch.distributed",
            )
        return cls(Shard(dist.get_rank(), dist.get_world_size(), experts))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place: the same bits on every rank."""
        dist.all_reduce(tensor)
        return tensor

    def side_by_side(self, tensor: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """tensor [rows, n] of each rank -> [rows, ranks * n], into `out` where given."""
        rows, columns = tensor.shape
        parts = tensor.new_empty(self.shard.size * rows, columns)
        dist.all_gather_into_tensor(parts, tensor.contiguous())
        whole = parts.view(self.shard.size, rows, columns).transpose(0, 1)
        if out is None:
            out = tensor.new_empty(rows, self.shard.size * columns)
        out.view(rows, self.shard.size, columns).copy_(whole)
        return out

    def smallest(self, value: int) -> int:
        """The smallest of the ranks' values, for instance of the room for a cache."""
        return min(self._all(value))

    def of_rank_0(self, value: int) -> int:
        """Returns rank 0's value, for instance a random seed."""
        return self._all(value)[0]

    def _all(self, value: int) -> list[int]:
        values: list[int | None] = [None] * self.shard.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]
